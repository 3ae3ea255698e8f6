"""A failure of one rank becomes an error on all: it says why, lets the others go, and they say it again.

Ranks wait for each other inside of process groups, where nothing can be said. So the rank that fails leaves a report
in the job's store and closes its connections. Whoever waits on one of them gets an error from the process group at
once, closes its own, and reads the report; so it goes on through the whole layout.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

import torch.distributed as dist

from graphcomp.compat.process_groups import cut_off, give_up
from graphcomp.errors import RankFailure, error_text
from graphcomp.runtime.failures.report import Board, Phase, Report, ranks_text
from graphcomp.runtime.failures.signals import signals_held
from graphcomp.runtime.program.channel import Channel, PeerLate, PeerLost
from graphcomp.runtime.ranks.layout import Layout

LOST = (
    "Connection closed by peer",
    "Connection reset by peer",
    "roken pipe",
    "Application timeout caused pair closure",
)
LATE = ("Timed out waiting", "Read timeout", "Connect timeout")
"""How gloo says that a peer is gone, or has been waited for in vain; it has no error types for that."""

PATIENCE = {"error": 0.0, "late": 1.5, "lost": 3.0}
"""Seconds to look for the report of another rank, before this one makes its own. Who waited first gives up first."""

_POLL = 0.05
_LONGEST = 20.0
"""Seconds for leaving altogether, should a store not answer."""

_UNUSABLE = (
    "This step object is of no more use: make a new mesh and a new step on all ranks, or start the processes again"
)

Result = TypeVar("Result")
End = TypeVar("End", dist.ProcessGroup, Channel)


@dataclass
class Progress:
    """What this rank is doing, in words, in which call of the step object, and how far it has come."""

    call: int = 0
    doing: str = "making the step"
    phase: Phase = "running"

    def begin(self, doing: str) -> None:
        self.call, self.doing, self.phase = self.call + 1, doing, "running"

    def come_to(self, phase: Phase, doing: str) -> None:
        self.doing, self.phase = doing, phase


class Failures:
    """How a rank leaves a call that it cannot finish.

    progress: kept up to date by the caller. shared: groups besides those of the layout that peers may wait on.
    """

    def __init__(
        self, layout: Layout, progress: Progress, shared: Callable[[], Iterable[dist.ProcessGroup]] = tuple
    ) -> None:
        self.layout, self.progress, self.shared = layout, progress, shared
        self.broken: str | None = None
        self._board = None if layout.side is None else Board(layout.side)
        self._left: threading.Event | None = None
        self._first: Report | None = None

    def guarded(self, work: Callable[[], Result], known: Callable[[BaseException], bool] = lambda _: False) -> Result:
        """What `work` returns; whatever it raises is raised on all ranks, and this step object is done with.

        An error of this rank's own keeps its type and gets notes; that another rank is gone, or has left, is a
        RankFailure. known: whether all ranks have been told of an error already, and nothing is under way.
        """
        try:
            return work()
        except BaseException as error:
            try:
                ending = self._end(error, known)
            except BaseException as second:  # a signal came in: Ctrl-C while this rank was waiting, or twice
                ending = self._end(second, known)
            if ending is error:
                raise
            raise ending from error

    def _end(self, error: BaseException, known: Callable[[BaseException], bool]) -> BaseException:
        """The error to raise, when all is closed."""
        if known(error) or self._board is None:
            return error
        cause, where = cause_of(error), self._where(error)
        text = error_text(error) if cause == "error" else _plain(error)
        own = Report(cause, self._rank, where, text, self.progress.call, self.progress.phase)
        with signals_held():
            if self._left is None:
                self.broken = f"{text.splitlines()[0]} (in {where})"
                self._left = self._begin_to_leave(own)
        self._left.wait(_LONGEST)
        first = self._first or own
        if first is not own:  # what was noticed here is only that connections were closed
            self.broken = f"{first.error.splitlines()[0]} (in {first.where})"
        if cause != "error":
            return self._failure(first, where, error)
        if f"in {where}" not in notes_of(error):
            error.add_note(f"in {where}")
        told = "The other ranks have been told"
        if first.rank != self._rank:
            told = f"Before that, {first.where} failed: {first.error}"
        error.add_note(f"{told}. {self._state(first)}. {_UNUSABLE}")
        return error

    @property
    def _rank(self) -> int:
        return self.layout.ranks[self.layout.rank]

    def _where(self, error: BaseException) -> str:
        """rank, stage, microbatch and action, from the executor's note; or what the rank was doing besides."""
        start = f"in rank {self._rank}, "
        found = next((note for note in reversed(notes_of(error)) if note.startswith(start)), None)
        if found is not None:
            return found.removeprefix("in ")
        detail = "".join(f", {note[3:]}" for note in notes_of(error) if note.startswith("in microbatch "))
        return f"rank {self._rank}, {self.layout.own_text}, {self.progress.doing}{detail}"

    def _begin_to_leave(self, report: Report) -> threading.Event:
        """Set when all is closed. In another thread, as no signal interrupts that; here, if there is none to be had."""
        left = threading.Event()

        def leave() -> None:
            try:
                self._leave(report)
            finally:
                left.set()

        try:
            threading.Thread(target=leave, name="graphcomp leaves", daemon=True).start()
        except RuntimeError:
            leave()
        return left

    def _leave(self, report: Report) -> None:
        board = self._board
        if board is None:
            return
        if report.cause == "error":
            self._first = board.post(report)
        for channel in self.layout.own_channels:
            _try(Channel.close, channel)
        with contextlib.suppress(Exception):  # what is not there any more keeps nobody waiting
            for group in self.shared():
                _try(cut_off, group)
        for own in self.layout.own_groups:
            _try(give_up, own)
        board.sign_off()
        if report.cause == "error":
            return
        end = time.monotonic() + PATIENCE[report.cause]
        while (found := board.read()) is None and time.monotonic() < end:
            time.sleep(_POLL)
        self._first = found or board.post(replace(report, silent=board.silent()))

    def _failure(self, first: Report, where: str, error: BaseException) -> RankFailure:
        silent = ranks_text([rank for rank in first.silent if rank != self._rank])
        match first.cause:
            case "error":
                what, do = f"rank {first.rank} failed", f"see the error on rank {first.rank}"
            case "late":
                what = f"rank {first.rank} waited for another rank until the deadline"
                what += f"; nothing was heard of {silent}" if silent else ""
                do = f"see what {silent or 'the other ranks'} did; raise Plan(deadline=...) if that may take so long"
            case "lost":
                what = f"the connection to {silent or 'another rank'} broke, and nothing was heard of it since"
                do = f"see how the process of {silent or 'the other rank'} ended, or whether it has left the loop"
                if self._board is not None and not self._board.reachable:
                    what = "the connection to another rank broke, and the job's store cannot be reached"
                    do = "see how the process ended that holds the store: rank 0, unless torchrun holds it"
        failure = RankFailure(what, where=first.where, got=first.error, do=f"{do}. {self._state(first)}. {_UNUSABLE}")
        if first.rank != self._rank or first.where != where:
            failure.add_note(f"noticed in {where}: {_plain(error)}")
        return failure

    def _state(self, first: Report) -> str:
        """What has been written in the call that failed."""
        before, mine, theirs = "Gradients, buffers and parameters are as before the call", self.progress, first.phase
        if mine.phase == "writing":
            return "Gradients and buffers may be written in part on this rank, and the step complete on others"
        if mine.phase == "complete":
            return "The step is complete on this rank, with all that it writes"
        if first.call < mine.call and theirs == "complete":
            return "The call before is complete on all ranks"
        if first.call < mine.call:
            return f"Rank {first.rank} did not complete the call before, which is complete on this rank"
        if first.call > mine.call or theirs == "complete":
            return f"{before} on this rank; rank {first.rank} has completed it"
        if theirs != "running" and mine.phase == "closing":
            return f"{before} on this rank; one that is through with the closing exchange has completed the step"
        return f"{before}, on all ranks"  # a rank that has not come to the exchange keeps all others in it


def _try(close: Callable[[End], None], end: End) -> None:
    """One group or channel that cannot be closed must not keep the others open."""
    with contextlib.suppress(Exception):
        close(end)


def _plain(error: BaseException) -> str:
    """What a process group says, without its own source line and general advice."""
    text = (str(error).splitlines() or [""])[0].partition("This is typically caused")[0].strip()
    return text.partition("] ")[2] if text.startswith("[/") else text


def notes_of(error: BaseException) -> list[str]:
    return list(getattr(error, "__notes__", []))


def cause_of(error: BaseException) -> Literal["error", "late", "lost"]:
    """Whether a process group, or a channel, raised it because of another rank."""
    if isinstance(error, PeerLate | PeerLost):
        return "late" if isinstance(error, PeerLate) else "lost"
    if isinstance(error, RuntimeError):
        if any(text in str(error) for text in LATE):
            return "late"
        if isinstance(error, dist.DistBackendError) or any(text in str(error) for text in LOST):
            return "lost"
    return "error"
