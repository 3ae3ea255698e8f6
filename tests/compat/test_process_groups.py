"""A group's ranks are found by the name that graphs hold; a group that is cut off keeps nobody waiting."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from graphcomp.compat.collective_operators import ALL_REDUCE, WAIT
from graphcomp.compat.process_groups import give_up, group_of, job_store, ranks_of
from graphcomp.testing import run_ranks
from tests.collectives.fake import fake_mesh


def test_ranks_by_name() -> None:
    with fake_mesh(rank=3, dp=2, tp=2) as mesh:
        group = dist.new_group([1, 3])
        assert ranks_of(group.group_name) == (1, 3)
        assert ranks_of(mesh.get_group("tp").group_name) == (2, 3)
        with pytest.raises(RuntimeError, match="nobody"):
            ranks_of("nobody")


def wait_on(group: dist.ProcessGroup, how: str) -> str:
    """The error that comes."""
    try:
        if how == "receive":
            group.recv([torch.empty(1)], group.rank() - 1, 0).wait()
        elif how == "functional":
            WAIT(ALL_REDUCE(torch.ones(3), "sum", group.group_name))
        else:
            dist.all_reduce(torch.ones(1), group=group)
    except RuntimeError as error:
        return str(error)
    return ""


def waiting(rank: int) -> list[tuple[str, float, float]]:
    """Rank 0 gives groups up while the others wait, for each other too; another group goes on."""
    found, other = [], dist.new_group([0, 1, 2])
    for how in ("receive", "functional", "collective"):
        group, begun = dist.new_group([0, 1, 2]), time.monotonic()
        text = wait_on(group, how) if rank else ""
        give_up(group)
        seconds = time.monotonic() - begun
        give_up(group)  # nothing is left to do
        with pytest.raises(RuntimeError, match="process group"):
            group_of(group.group_name)
        total = torch.ones(1)
        dist.all_reduce(total, group=other)
        found.append((text, seconds, float(total)))
    job_store().set(f"seen by {rank}", "x")
    dist.barrier(group=other)
    assert job_store().check([f"seen by {each}" for each in range(3)])
    return found


@pytest.mark.gloo
def test_who_waits_on_a_group_that_is_given_up_gets_an_error() -> None:
    limit = 120.0  # of the groups too: who is not let go waits as long
    first, *others = run_ranks(waiting, 3, timeout=limit)
    assert all("by peer" in text for found in others for text, _, _ in found)
    assert all(seconds < limit and total == 3 for found in (first, *others) for _, seconds, total in found)
