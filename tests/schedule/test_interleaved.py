"""Several stages on a rank: tables, properties at every size, and torch's own order where it has one."""

from __future__ import annotations

from itertools import product

import expecttest
import pytest
from torch.distributed.pipelining import schedules as theirs

from graphcomp.errors import ScheduleError
from graphcomp.schedule import (
    KNOWN,
    Action,
    Cost,
    Kind,
    Schedule,
    check,
    fuse,
    get,
    parse,
    peak_in_flight,
    simulate,
    with_transfers,
    without_backward,
)

NAMES = ("gpipe", "interleaved-1f1b")
SIZES = list(product(range(1, 5), range(1, 4), range(10)))
"""Ranks, stages on each, microbatches."""


def complete(name: str, ranks: int, each: int, microbatches: int) -> Schedule:
    stages = ranks * each
    return with_transfers(get(name).build(stages, microbatches, ranks), range(stages - 1), range(1, stages))


class TestText(expecttest.TestCase):
    def test_interleaved(self) -> None:
        self.assertExpectedInline(
            get("interleaved-1f1b").build(4, 4, 2).text(),
            """\
interleaved-1f1b: 4 stages, 4 microbatches
rank 0 (stages 0 2): 0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3
rank 1 (stages 1 3): 1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3
""",
        )

    def test_rounds_are_as_equal_as_can_be(self) -> None:
        """Three rounds for seven microbatches on two ranks, the largest last. The last stage fuses in all of them."""
        schedule = fuse(get("interleaved-1f1b").build(4, 7, 2))
        self.assertExpectedInline(
            schedule.text(),
            """\
interleaved-1f1b: 4 stages, 7 microbatches
rank 0 (stages 0 2): 0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 0F4 2B2 0F5 2B3 0F6 0B2 2F4 0B3 2F5 2F6 2B4 2B5 2B6 0B4 0B5 0B6
rank 1 (stages 1 3): 1F0 1F1 3FB0 3FB1 1F2 1B0 1F3 1B1 3FB2 3FB3 1F4 1B2 1F5 1B3 1F6 3FB4 3FB5 3FB6 1B4 1B5 1B6
""",  # noqa: E501
        )

    def test_transfers(self) -> None:
        self.assertExpectedInline(
            complete("interleaved-1f1b", 2, 2, 2).text(),
            """\
interleaved-1f1b: 4 stages, 2 microbatches
forward edges: 0 1 2
backward edges: 1 2 3
rank 0 (stages 0 2): 0F0 0SEND_F0 0F1 2RECV_F0 0SEND_F1 2F0 2RECV_F1 2SEND_F0 2F1 2SEND_F1 2RECV_B0 2B0 2RECV_B1 2SEND_B0 2B1 0RECV_B0 2SEND_B1 0B0 0RECV_B1 0B1
rank 1 (stages 1 3): 1RECV_F0 1F0 1SEND_F0 1RECV_F1 1F1 1SEND_F1 3RECV_F0 3F0 3B0 3RECV_F1 3SEND_B0 3F1 3B1 3SEND_B1 1RECV_B0 1B0 1SEND_B0 1RECV_B1 1B1 1SEND_B1
""",  # noqa: E501
        )

    def test_gpipe(self) -> None:
        self.assertExpectedInline(
            get("gpipe").build(4, 3, 2).text(),
            """\
gpipe: 4 stages, 3 microbatches
rank 0 (stages 0 2): 0F0 0F1 0F2 2F0 2F1 2F2 2B0 2B1 2B2 0B0 0B1 0B2
rank 1 (stages 1 3): 1F0 1F1 1F2 3F0 3F1 3F2 3B0 3B1 3B2 1B0 1B1 1B2
""",
        )


@pytest.mark.parametrize("name", NAMES)
def test_every_size_completes(name: str) -> None:
    for ranks, each, microbatches in SIZES:
        schedule = complete(name, ranks, each, microbatches)
        messages = 2 * (ranks * each - 1) * microbatches if ranks > 1 else 0
        for one in (schedule, fuse(schedule)):
            proof = check(one)
            assert proof.blocking and proof.actions == sum(map(len, one.ranks))
            check(one, blocking=False)
        assert sum(action.kind.is_send for actions in schedule.ranks for action in actions) == messages


@pytest.mark.parametrize("name", NAMES)
def test_every_stage_runs_every_microbatch_in_order(name: str) -> None:
    for ranks, each, microbatches in SIZES:
        schedule = get(name).build(ranks * each, microbatches, ranks)
        for stage, kind in product(range(ranks * each), (Kind.F, Kind.B)):
            done = [a for a in schedule.ranks[stage % ranks] if (a.stage, a.kind) == (stage, kind)]
            assert done == [Action(stage, kind, microbatch) for microbatch in range(microbatches)]


@pytest.mark.parametrize("name", NAMES)
def test_stages_without_a_backward(name: str) -> None:
    for ranks, each, microbatches in product((2, 3), (2, 3), (1, 4, 5)):
        stages = ranks * each
        for frozen in range(stages + 1):
            schedule = without_backward(get(name).build(stages, microbatches, ranks), range(frozen))
            check(with_transfers(schedule, range(stages - 1), range(frozen + 1, stages)))


def test_the_last_stage_always_fuses() -> None:
    for ranks, each, microbatches in SIZES:
        fused = fuse(complete("interleaved-1f1b", ranks, each, microbatches))
        last = [action for action in fused.ranks[-1] if action.stage == ranks * each - 1]
        assert [action for action in last if not action.kind.is_transfer] == [
            Action(ranks * each - 1, Kind.FB, microbatch) for microbatch in range(microbatches)
        ]


def test_what_a_rank_holds() -> None:
    for ranks, each, microbatches in SIZES:
        largest = -(-microbatches // max(1, microbatches // ranks))
        bound = [(each - 1) * largest + 2 * (ranks - 1 - rank) + 1 for rank in range(ranks)]
        found = peak_in_flight(get("interleaved-1f1b").build(ranks * each, microbatches, ranks))
        assert all(held <= limit for held, limit in zip(found, bound, strict=True))
        if microbatches and microbatches % max(1, microbatches // ranks) == 0:  # rounds of one size
            assert found == tuple(min(limit, each * microbatches) for limit in bound)


def test_the_bubble_shrinks_with_the_stages_of_a_rank() -> None:
    """A rank's work takes 1 second forward and 2 backward, in as many pieces as it has stages."""
    ranks = 4
    for each in (1, 2, 4):
        cost = Cost.uniform(ranks * each, forward=1 / each, backward=2 / each)
        found = simulate(get("interleaved-1f1b").build(ranks * each, 8, ranks), cost).seconds
        assert found == pytest.approx(3 * 8 + 3 * (ranks - 1) / each)


def test_order_is_that_of_torchs_table() -> None:
    compared = 0
    for ranks, each, microbatches in SIZES:
        rounds = max(1, microbatches // ranks)
        if microbatches == 0 or microbatches % rounds:
            continue  # torch refuses these
        one = object.__new__(theirs.ScheduleInterleaved1F1B)  # without stages that are modules
        one.pp_group_size, one.n_local_stages, one._n_microbatches = ranks, each, microbatches
        one.number_of_rounds, one.microbatches_per_round = rounds, microbatches // rounds
        schedule = get("interleaved-1f1b").build(ranks * each, microbatches, ranks)
        for rank in range(ranks):
            table = one._calculate_single_rank_operations(rank)
            assert list(schedule.ranks[rank]) == [parse(str(entry)) for entry in table if entry is not None]
            compared += 1
    assert compared == 27 + 36 + 72 + 96  # for 1, 2, 3, 4 ranks


@pytest.mark.parametrize("name", KNOWN)
@pytest.mark.parametrize(("stages", "ranks"), [(4, 3), (4, 0), (2, 4), (6, -2)])
def test_stages_that_cannot_be_dealt(name: str, stages: int, ranks: int) -> None:
    with pytest.raises(ScheduleError, match=f"schedule '{name}' cannot deal these stages to these ranks") as caught:
        get(name).build(stages, 3, ranks)
    several = "as many stages on each rank as on any other"
    assert caught.value.expected == (several if name in NAMES else "one stage on each rank")
    assert caught.value.got == f"stages={stages}, ranks={ranks}"


@pytest.mark.parametrize("name", sorted(set(KNOWN) - set(NAMES)))
def test_schedules_with_one_stage_on_each_rank(name: str) -> None:
    assert get(name).build(4, 3, 4) == get(name).build(4, 3)
    with pytest.raises(ScheduleError, match="cannot deal"):
        get(name).build(4, 3, 2)
