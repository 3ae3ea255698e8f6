"""The process spawner: order of results, the first error in time, death, time limit; nothing stays behind."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from graphcomp.errors import PlanError, RankFailure
from graphcomp.testing.ranks import run_ranks

pytestmark = pytest.mark.gloo


@pytest.fixture(autouse=True)
def no_process_is_left() -> Iterator[None]:
    yield
    assert multiprocessing.active_children() == []


class Unpicklable(Exception):
    def __init__(self, first: str, second: str) -> None:
        super().__init__(first)


def gather(rank: int, scale: float) -> tuple[int, torch.Tensor, int, str]:
    total = torch.tensor([float(rank + 1)]) * scale
    dist.all_reduce(total)
    return rank, total.requires_grad_(), torch.get_num_threads(), os.environ["RANK"]


def fail(rank: int, failing: int, how: str) -> None:
    """One rank fails; the others wait in a collective that it never joins."""
    if rank == failing:
        time.sleep(0.2)
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "exit":
            os._exit(3)
        if how == "unpicklable":
            raise Unpicklable("one", "two")
        if how == "own":
            error = RankFailure("peer gone") if rank == 0 else PlanError("odd plan", expected=1, got=2)
            error.add_note("stage 1")
            raise error
        raise KeyError("missing")
    dist.all_reduce(torch.ones(1))


def fail_everywhere(rank: int, first: int) -> None:
    time.sleep(0.05 if rank == first else 0.25)
    raise ValueError(f"rank {rank}")


def fail_and_leave(rank: int) -> None:
    """The peer's connection breaks because this rank leaves: a consequence that must not hide the cause."""
    dist.barrier()
    if rank == 1:
        os._exit(7)
    dist.all_reduce(torch.ones(1))


def sleep(rank: int) -> None:
    if rank == 1:
        wait_here_for_long()


def wait_here_for_long() -> None:
    time.sleep(600)


def give_back_a_lambda(rank: int) -> object:
    return lambda: rank


def test_results_come_in_rank_order() -> None:
    results = run_ranks(gather, 3, 2.0)
    assert [(rank, total.item(), threads, name) for rank, total, threads, name in results] == [
        (rank, 12.0, 1, str(rank)) for rank in range(3)
    ]


def surroundings(rank: int) -> tuple[int, str | None, float]:
    return hash("a text"), os.environ.get("GRAPHCOMP_TEST"), random.random()


def test_copies_and_fresh_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both see the environment as it is now, and draw differently; only copies hash alike."""
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    for value, fresh in (("one", False), ("two", False), ("three", True)):
        monkeypatch.setenv("GRAPHCOMP_TEST", value)
        first, second = run_ranks(surroundings, 2, fresh=fresh)
        assert first[1] == second[1] == value
        assert first[2] != second[2]
        assert (first[0] != second[0]) == fresh


@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_ends_all_while_the_others_wait(failing: int) -> None:
    with pytest.raises(KeyError, match="missing") as caught:
        run_ranks(fail, 2, failing, "raise", timeout=120)
    note = "\n".join(caught.value.__notes__)
    assert f"raised on rank {failing} of 2" in note and 'raise KeyError("missing")' in note


@pytest.mark.parametrize("first", [0, 1])
def test_the_first_error_in_time_is_shown(first: int) -> None:
    with pytest.raises(ValueError, match=f"^rank {first}"):
        run_ranks(fail_everywhere, 2, first)


def test_an_error_of_ours_keeps_its_parts_and_notes() -> None:
    with pytest.raises(PlanError, match="odd plan") as caught:
        run_ranks(fail, 2, 1, "own")
    assert (caught.value.expected, caught.value.got) == (1, 2)
    assert caught.value.__notes__[0] == "stage 1"


def test_an_error_that_cannot_travel_is_shown_as_text() -> None:
    with pytest.raises(RankFailure, match=r"rank 1 of 2(.|\n)*Unpicklable: one"):
        run_ranks(fail, 2, 1, "unpicklable")


@pytest.mark.parametrize(("how", "shown"), [("kill", "killed by SIGKILL"), ("exit", "exit code 3")])
def test_a_process_that_dies_is_named(how: str, shown: str) -> None:
    with pytest.raises(RankFailure, match=rf"rank 1 of 2(.|\n)*died without an error: {shown}"):
        run_ranks(fail, 2, 1, how, timeout=120)


def test_a_broken_connection_does_not_hide_the_death_behind_it() -> None:
    with pytest.raises(RankFailure, match=r"rank 1 of 2(.|\n)*exit code 7"):
        run_ranks(fail_and_leave, 2)


def test_the_time_limit_shows_where_each_process_stands() -> None:
    run_ranks(gather, 2, 1.0)  # what the others are copied from is there
    with pytest.raises(RankFailure, match=r"1 of 2 processes did not finish(.|\n)*rank 1:(.|\n)*wait_here_for_long"):
        run_ranks(sleep, 2, timeout=6)


def test_a_result_that_cannot_travel_is_an_error() -> None:
    with pytest.raises(Exception, match=r"(?i)pickle"):
        run_ranks(give_back_a_lambda, 1)


def test_wrong_use() -> None:
    with pytest.raises(PlanError, match="world_size >= 1"):
        run_ranks(gather, 0)
    with pytest.raises(PlanError, match="at the top of a module"):
        run_ranks(lambda rank: rank, 1)
