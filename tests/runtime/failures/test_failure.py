"""What is said of a failure: by the rank that fails, and by those that hear of it. Between processes: tests/faults."""

from __future__ import annotations

import dataclasses
import os
import pickle
import signal
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from graphcomp.compat.process_groups import group_of, job_store
from graphcomp.errors import RankFailure
from graphcomp.runtime.failures import failure
from graphcomp.runtime.failures.failure import Failures, Progress, cause_of
from graphcomp.runtime.failures.report import Board, Report, ranks_text
from graphcomp.runtime.program.channel import Channel, PeerLate, PeerLost
from graphcomp.runtime.ranks.agreement import Agreement
from graphcomp.runtime.ranks.layout import Layout
from tests.runtime.sharded import alone

pytestmark = pytest.mark.gloo

CLOSED = "[/a/gloo/pair.cc:553] Connection closed by peer [127.0.0.1]:3992. This is typically caused by a remote worker"
BEFORE = "Gradients, buffers and parameters are as before the call"
LATE = "[/a/gloo/unbound_buffer.cc:78] Timed out waiting 4000ms for recv operation to complete"


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    with alone() as found:
        yield found


@pytest.fixture
def failures(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> Failures:
    """Of rank 0 in a pipeline of three, in its fifth call. Nobody waits long for what no other rank says."""
    monkeypatch.setattr(failure, "PATIENCE", {"error": 0.0, "late": 0.0, "lost": 0.0})
    layout = Layout(0, (0, 1, 2), torch.device("cpu"), side=dist.new_group([0]))
    return Failures(layout, Progress(call=5, doing="counting tokens"))


def other(failures: Failures, **changes: Any) -> None:
    """Rank 2 has been first."""
    report = {"cause": "error", "rank": 2, "where": "rank 2, stage 2, microbatch 1, action 2F1", "error": "KeyError: 1"}
    assert failures._board is not None
    failures._board.post(Report(**{**report, "call": 5, **changes}))


def ends(failures: Failures, error: BaseException, *notes: str) -> BaseException:
    def work() -> None:
        for note in notes:
            error.add_note(note)
        raise error

    with pytest.raises(type(error) if cause_of(error) == "error" else RankFailure) as caught:
        failures.guarded(work)
    return caught.value


def test_work_that_ends_well(failures: Failures) -> None:
    assert failures.guarded(lambda: 7) == 7
    assert failures.broken is None


def test_an_error_of_this_rank_is_posted_and_gets_notes(failures: Failures) -> None:
    error = ZeroDivisionError("user code")
    assert ends(failures, error, "in rank 0, stage 0, microbatch 1, action 0F1") is error
    place, told = error.__notes__
    assert place == "in rank 0, stage 0, microbatch 1, action 0F1"
    assert told.startswith(
        "The other ranks have been told. Gradients, buffers and parameters are as before the call, on"
    )
    assert failures.broken == "ZeroDivisionError: user code (in rank 0, stage 0, microbatch 1, action 0F1)"
    assert failures._board is not None
    posted = failures._board.read()
    assert posted == Report("error", 0, place.removeprefix("in "), "ZeroDivisionError: user code", 5)
    assert failures.layout.side is not None
    with pytest.raises(RuntimeError, match="process group"):
        group_of(failures.layout.side.group_name)


def test_channels_are_closed(failures: Failures) -> None:
    ours, theirs = socket.socketpair()
    channel, peer = Channel(ours, 1, 30.0), Channel(theirs, 0, 30.0)
    failures.layout = dataclasses.replace(failures.layout, channels={1: [channel]})
    ends(failures, ValueError("here"))
    with pytest.raises(PeerLost):
        peer.post([torch.zeros(1)]).wait()
    peer.close()


def test_a_channel_that_cannot_be_closed_keeps_nothing_open(
    failures: Failures, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = socket.socketpair()
    stuck, peer = Channel(ours, 1, 30.0), Channel(theirs, 0, 30.0)
    failures.layout = dataclasses.replace(failures.layout, channels={1: [stuck, Channel(socket.socket(), 1, 30.0)]})
    closed: list[Channel] = []

    def close(channel: Channel) -> None:
        closed.append(channel)
        raise RuntimeError("cannot be closed")

    monkeypatch.setattr(Channel, "close", close)
    ends(failures, ValueError("here"))
    monkeypatch.undo()
    assert closed == failures.layout.channels[1] and failures._board is not None
    assert failures._board.silent() == () and failures.layout.side is not None
    with pytest.raises(RuntimeError, match="process group"):
        group_of(failures.layout.side.group_name)
    for channel in (*closed, peer):
        channel.close()


def test_ctrl_c_while_the_thread_that_leaves_is_started(
    failures: Failures, monkeypatch: pytest.MonkeyPatch, ctrl_c: None
) -> None:
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt) as caught:
        failures.guarded(lambda: 1 // 0)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert failures._board is not None
    posted = failures._board.read()
    assert posted is not None and posted.error.startswith("ZeroDivisionError") and failures._board.silent() == ()
    assert any("Before that" in note or "have been told" in note for note in caught.value.__notes__)


def test_without_a_thread_to_be_had_the_rank_leaves_all_the_same(
    failures: Failures, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    error = ends(failures, ValueError("here"))
    assert error.__notes__[-1].startswith("The other ranks have been told.")
    assert failures._board is not None
    posted = failures._board.read()
    assert posted is not None and posted.error == "ValueError: here" and failures._board.silent() == ()


def test_without_a_place_of_its_own_it_is_what_the_rank_was_doing(failures: Failures) -> None:
    error = ends(failures, KeyboardInterrupt(), "in microbatch 3")
    assert "in rank 0, stage 0, counting tokens, microbatch 3" in error.__notes__
    assert failures.broken == "KeyboardInterrupt (in rank 0, stage 0, counting tokens, microbatch 3)"


def test_what_came_first_elsewhere_is_said_with_an_own_error(failures: Failures) -> None:
    other(failures)
    told = ends(failures, ValueError("here too")).__notes__[-1]
    assert told.startswith("Before that, rank 2, stage 2, microbatch 1, action 2F1 failed: KeyError: 1. Gradients")


def test_the_failure_of_another_rank(failures: Failures) -> None:
    other(failures)
    error = ends(failures, RuntimeError(CLOSED), "in rank 0, stage 0, at: %3 = wait 1>0 of microbatch 0")
    assert isinstance(error, RankFailure) and isinstance(error.__cause__, RuntimeError)
    assert (error.what, error.where) == ("rank 2 failed", "rank 2, stage 2, microbatch 1, action 2F1")
    assert error.got == "KeyError: 1"
    assert "see the error on rank 2. Gradients, buffers and parameters are as before the call, on all" in str(error)
    assert "make a new mesh and a new step on all ranks" in str(error)
    noticed = (
        "noticed in rank 0, stage 0, at: %3 = wait 1>0 of microbatch 0: Connection closed by peer [127.0.0.1]:3992."
    )
    assert error.__notes__ == [noticed]
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_a_rank_that_is_gone_without_a_word(failures: Failures, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Board, "silent", lambda self: (1, 2))
    error = ends(failures, RuntimeError(CLOSED))
    assert "the connection to ranks 1 and 2 broke, and nothing was heard of it since\n" in str(error)
    assert "where: rank 0, stage 0, counting tokens\n  got: Connection closed by peer [127.0.0.1]:3992.\n" in str(error)


def test_a_rank_that_does_not_come(failures: Failures, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Board, "silent", lambda self: (2,))
    error = ends(failures, RuntimeError(LATE), "in rank 0, stage 0, at: %3 = wait 1>0 of microbatch 0")
    assert "rank 0 waited for another rank until the deadline; nothing was heard of rank 2\n" in str(error)
    assert "where: rank 0, stage 0, at: %3 = wait 1>0 of microbatch 0\n  got: Timed out waiting 4000ms" in str(error)
    assert "Plan(deadline=...)" in str(error)


@pytest.mark.parametrize(
    ("theirs", "ours", "says"),
    [
        ({}, "running", f"{BEFORE}, on all ranks."),
        ({}, "closing", f"{BEFORE}, on all ranks."),
        ({"phase": "closing"}, "running", f"{BEFORE}, on all ranks."),
        ({"phase": "closing"}, "closing", f"{BEFORE} on this rank; one that is through with the closing exchange"),
        ({"phase": "writing"}, "closing", f"{BEFORE} on this rank; one that is through with the closing exchange"),
        ({"phase": "complete"}, "closing", f"{BEFORE} on this rank; rank 2 has completed it."),
        ({"call": 6}, "closing", f"{BEFORE} on this rank; rank 2 has completed it."),
        ({"call": 4}, "running", "Rank 2 did not complete the call before, which is complete on this rank."),
        ({"call": 4, "phase": "complete"}, "running", "The call before is complete on all ranks."),
        ({}, "writing", "Gradients and buffers may be written in part on this rank"),
        ({}, "complete", "The step is complete on this rank, with all that it writes."),
    ],
)
def test_what_has_been_written(failures: Failures, theirs: dict[str, Any], ours: Any, says: str) -> None:
    other(failures, **theirs)
    failures.progress.phase = ours
    assert says in str(ends(failures, RuntimeError(CLOSED)))


def test_a_second_signal_while_leaving_is_raised_when_all_is_closed(
    failures: Failures, monkeypatch: pytest.MonkeyPatch
) -> None:
    ending, interrupts = failures._end, iter([KeyboardInterrupt("second")])

    def interrupted(error: BaseException, known: Any) -> BaseException:
        ended = ending(error, known)
        for interrupt in interrupts:
            raise interrupt
        return ended

    monkeypatch.setattr(failures, "_end", interrupted)
    with pytest.raises(KeyboardInterrupt, match="second"):
        failures.guarded(lambda: 1 // 0)
    assert failures.broken is not None and failures.broken.startswith("ZeroDivisionError")


def test_what_all_ranks_know_ends_nothing(failures: Failures) -> None:
    agreement = Agreement(failures.layout)
    known = agreement.told(ValueError("all alike"))

    def work() -> None:
        raise known

    with pytest.raises(ValueError, match="all alike"):
        failures.guarded(work, agreement.known)
    assert failures.broken is None and not hasattr(known, "__notes__")
    assert not agreement.known(known)  # it is kept no longer
    agreement.meet()


def test_alone_there_is_nobody_to_tell() -> None:
    failures, error = Failures(Layout(0, (0,), torch.device("cpu")), Progress()), RuntimeError(CLOSED)
    with pytest.raises(RuntimeError) as caught:
        failures.guarded(lambda: (_ for _ in ()).throw(error))
    assert caught.value is error and not hasattr(error, "__notes__")
    Agreement(failures.layout).meet()


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (RuntimeError(CLOSED), "lost"),
        (RuntimeError("writev: Broken pipe"), "lost"),
        (RuntimeError(LATE), "late"),
        (dist.DistBackendError("NCCL error"), "lost"),
        (PeerLost("Broken pipe, rank 1"), "lost"),
        (PeerLate("nothing came"), "late"),
        (RuntimeError("shapes cannot be multiplied"), "error"),
        (ConnectionResetError("Connection reset by peer"), "error"),  # of the user's own sockets
        (KeyboardInterrupt(), "error"),
        (SystemExit(3), "error"),
    ],
)
def test_causes(error: BaseException, cause: str) -> None:
    assert cause_of(error) == cause


# The board


def test_the_first_report_counts(mesh: DeviceMesh) -> None:
    board = Board(mesh.get_group())
    one = Report("error", 1, "here", "KeyError: 'ä'\n  second line", 3, "closing", (0, 2))
    two = Report("lost", 0, "there", "gone", 3)
    assert board.read() is None
    assert board.post(one) == one == board.post(two) == board.read()
    assert board.silent() == (0,)
    board.sign_off()
    assert board.silent() == () and board.reachable


def test_boards_do_not_meet(mesh: DeviceMesh) -> None:
    one, two = Board(mesh.get_group()), Board(mesh.get_group())
    one.post(Report("error", 0, "here", "x", 1))
    assert two.read() is None


def test_a_board_whose_store_is_gone() -> None:
    with alone() as mesh:
        board = Board(mesh.get_group())
    report = Report("error", 0, "here", "x", 1)
    assert board.post(report) is report
    assert (board.read(), board.silent(), board.reachable) == (None, (), False)
    board.sign_off()
    with pytest.raises(ValueError, match="not been initialized"):
        job_store()


def test_words_for_ranks() -> None:
    assert [ranks_text(ranks) for ranks in ([], [2], [0, 2], [0, 1, 3])] == [
        "",
        "rank 2",
        "ranks 0 and 2",
        "ranks 0, 1 and 3",
    ]
