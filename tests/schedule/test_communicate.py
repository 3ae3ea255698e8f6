"""Where sends and receives are put."""

from __future__ import annotations

from dataclasses import replace

import expecttest
import pytest

from graphcomp.errors import ScheduleError
from graphcomp.schedule import KNOWN, Kind, Schedule, check, fuse, get, with_transfers, without_backward


def all_transfers(schedule: Schedule) -> Schedule:
    return with_transfers(schedule, range(schedule.stages - 1), range(1, schedule.stages))


class TestText(expecttest.TestCase):
    def test_one_f_one_b(self) -> None:
        self.assertExpectedInline(
            all_transfers(get("1f1b").build(2, 3)).text(),
            """\
1f1b: 2 stages, 3 microbatches
forward edges: 0
backward edges: 1
rank 0 (stage 0): 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0F2 0SEND_F2 0RECV_B1 0B1 0RECV_B2 0B2
rank 1 (stage 1): 1RECV_F0 1F0 1B0 1RECV_F1 1SEND_B0 1F1 1B1 1RECV_F2 1SEND_B1 1F2 1B2 1SEND_B2
""",
        )

    def test_eager_one_f_one_b(self) -> None:
        """Rank 1 takes two activations before it gives its first gradient: rank 0 sends three before it takes one."""
        self.assertExpectedInline(
            all_transfers(get("eager-1f1b").build(2, 4)).text(),
            """\
eager-1f1b: 2 stages, 4 microbatches
forward edges: 0
backward edges: 1
rank 0 (stage 0): 0F0 0SEND_F0 0F1 0SEND_F1 0F2 0SEND_F2 0RECV_B0 0B0 0F3 0SEND_F3 0RECV_B1 0B1 0RECV_B2 0B2 0RECV_B3 0B3
rank 1 (stage 1): 1RECV_F0 1F0 1B0 1RECV_F1 1RECV_F2 1SEND_B0 1F1 1B1 1RECV_F3 1SEND_B1 1F2 1B2 1SEND_B2 1F3 1B3 1SEND_B3
""",  # noqa: E501
        )

    def test_gpipe(self) -> None:
        self.assertExpectedInline(
            all_transfers(get("gpipe").build(2, 2)).text(),
            """\
gpipe: 2 stages, 2 microbatches
forward edges: 0
backward edges: 1
rank 0 (stage 0): 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1
rank 1 (stage 1): 1RECV_F0 1F0 1RECV_F1 1F1 1B0 1SEND_B0 1B1 1SEND_B1
""",
        )

    def test_first_stage_has_nothing_to_train(self) -> None:
        schedule = without_backward(get("1f1b").build(3, 2), [0])
        self.assertExpectedInline(
            with_transfers(schedule, [0, 1], [2]).text(),
            """\
1f1b: 3 stages, 2 microbatches
backward stages: 1 2
forward edges: 0 1
backward edges: 2
rank 0 (stage 0): 0F0 0SEND_F0 0F1 0SEND_F1
rank 1 (stage 1): 1RECV_F0 1F0 1SEND_F0 1RECV_F1 1F1 1SEND_F1 1RECV_B0 1B0 1RECV_B1 1B1
rank 2 (stage 2): 2RECV_F0 2F0 2B0 2RECV_F1 2SEND_B0 2F1 2B1 2SEND_B1
""",
        )

    def test_fused(self) -> None:
        self.assertExpectedInline(
            all_transfers(fuse(get("1f1b").build(2, 2))).text(),
            """\
1f1b: 2 stages, 2 microbatches
forward edges: 0
backward edges: 1
rank 0 (stage 0): 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1
rank 1 (stage 1): 1RECV_F0 1FB0 1RECV_F1 1SEND_B0 1FB1 1SEND_B1
""",
        )


@pytest.mark.parametrize("name", KNOWN)
def test_one_message_for_each_edge_and_microbatch(name: str) -> None:
    for stages in range(1, 6):
        for microbatches in range(6):
            schedule = all_transfers(get(name).build(stages, microbatches))
            kinds = [action.kind for actions in schedule.ranks for action in actions]
            for kind in (Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B):
                assert kinds.count(kind) == (stages - 1) * microbatches


@pytest.mark.parametrize("name", KNOWN)
def test_transfers_change_no_order_of_compute(name: str) -> None:
    schedule = get(name).build(4, 5)
    for before, after in zip(schedule.ranks, all_transfers(schedule).ranks, strict=True):
        assert before == tuple(action for action in after if not action.kind.is_transfer)


def test_stages_of_one_rank_need_no_transfer() -> None:
    schedule = get("gpipe").build(2, 2)
    together = replace(
        schedule, ranks=(schedule.ranks[0][:2] + schedule.ranks[1] + schedule.ranks[0][2:],), placement=(0, 0)
    )
    inserted = all_transfers(together)
    assert inserted.ranks == together.ranks
    check(inserted)


def test_a_boundary_without_values_has_no_transfer() -> None:
    schedule = with_transfers(get("1f1b").build(3, 2), [1], [2])
    check(schedule)
    assert not any(action.kind.is_transfer for action in schedule.ranks[0])


@pytest.mark.parametrize(
    ("forward", "backward", "message"),
    [
        ([2], [], "a forward edge cannot exist"),
        ([-1], [], "a forward edge cannot exist"),
        ([], [0], "a backward edge cannot exist"),
        ([], [3], "a backward edge cannot exist"),
    ],
)
def test_edges_that_cannot_exist(forward: list[int], backward: list[int], message: str) -> None:
    with pytest.raises(ScheduleError, match=message) as caught:
        with_transfers(get("1f1b").build(3, 2), forward, backward)
    assert caught.value.got == forward + backward


def test_an_edge_to_a_stage_without_backward_cannot_exist() -> None:
    schedule = without_backward(get("1f1b").build(3, 2), [0])
    with pytest.raises(ScheduleError, match="needs a backward on both of its stages") as caught:
        with_transfers(schedule, [0, 1], [1, 2])
    assert caught.value.expected == "sending stages among [2]"


def test_transfers_are_inserted_once() -> None:
    with pytest.raises(ScheduleError, match="has its transfers already"):
        all_transfers(all_transfers(get("1f1b").build(2, 2)))
