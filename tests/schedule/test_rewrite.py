"""Fused actions, and stages without a backward."""

from __future__ import annotations

import expecttest
import pytest

from graphcomp.errors import ScheduleError
from graphcomp.schedule import (
    KNOWN,
    Kind,
    Schedule,
    check,
    fuse,
    get,
    peak_in_flight,
    with_transfers,
    without_backward,
)


def fused_stages(schedule: Schedule) -> set[int]:
    return {action.stage for actions in schedule.ranks for action in actions if action.kind is Kind.FB}


class TestText(expecttest.TestCase):
    def test_fuse(self) -> None:
        self.assertExpectedInline(
            fuse(get("1f1b").build(2, 3)).text(),
            """\
1f1b: 2 stages, 3 microbatches
rank 0 (stage 0): 0F0 0F1 0B0 0F2 0B1 0B2
rank 1 (stage 1): 1FB0 1FB1 1FB2
""",
        )

    def test_evaluation(self) -> None:
        self.assertExpectedInline(
            without_backward(get("gpipe").build(2, 3), range(2)).text(),
            """\
gpipe: 2 stages, 3 microbatches
backward stages: none
rank 0 (stage 0): 0F0 0F1 0F2
rank 1 (stage 1): 1F0 1F1 1F2
""",
        )


def test_the_last_stage_of_1f1b_is_fused_whole_and_no_other() -> None:
    for stages in range(1, 6):
        for microbatches in range(1, 6):
            schedule = fuse(get("1f1b").build(stages, microbatches))
            assert {action.kind for action in schedule.ranks[-1]} == {Kind.FB}
            assert fused_stages(schedule) == {stages - 1}


def test_gpipe_is_fused_for_one_microbatch_only() -> None:
    # With one microbatch F and B stand together on every rank, but only the last waits for no gradient.
    assert fused_stages(fuse(get("gpipe").build(3, 1))) == {2}
    assert fused_stages(fuse(get("gpipe").build(3, 2))) == set()


@pytest.mark.parametrize("name", KNOWN)
def test_fusing_and_inserting_transfers_commute(name: str) -> None:
    for stages in range(1, 6):
        for microbatches in range(6):
            schedule = get(name).build(stages, microbatches)
            edges = range(stages - 1), range(1, stages)
            early, late = with_transfers(fuse(schedule), *edges), fuse(with_transfers(schedule, *edges))
            assert early == late
            check(early)


@pytest.mark.parametrize("name", KNOWN)
def test_every_number_of_leading_stages_without_backward(name: str) -> None:
    for stages in range(1, 6):
        for microbatches in range(6):
            for frozen in range(stages + 1):
                schedule = without_backward(get(name).build(stages, microbatches), range(frozen))
                complete = with_transfers(schedule, range(stages - 1), range(frozen + 1, stages))
                check(complete)
                for stage in range(frozen):
                    kinds = {action.kind for action in complete.ranks[stage]}
                    assert kinds <= {Kind.F, Kind.SEND_F, Kind.RECV_F}
                assert all(held <= 1 for held in peak_in_flight(complete)[:frozen])


def test_only_stages_that_exist() -> None:
    with pytest.raises(ScheduleError, match="a stage that does not exist") as caught:
        without_backward(get("gpipe").build(2, 1), [2])
    assert caught.value.expected == "stages among 0..1"
    assert caught.value.got == [2]


@pytest.mark.parametrize("rewrite", [fuse, lambda schedule: with_transfers(schedule, [0], [1])])
def test_backwards_are_dropped_first(rewrite: object) -> None:
    assert callable(rewrite)
    with pytest.raises(ScheduleError, match="drop the backwards first"):
        without_backward(rewrite(get("1f1b").build(2, 2)), [0])
