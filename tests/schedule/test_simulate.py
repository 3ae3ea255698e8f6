"""Times and memory against values worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import expecttest
import pytest

from graphcomp.errors import ScheduleError
from graphcomp.schedule import (
    KNOWN,
    Cost,
    Kind,
    fuse,
    get,
    parse,
    peak_bytes,
    simulate,
    timeline,
    with_transfers,
    without_backward,
)


def unit(stages: int, kept_bytes: int = 0) -> Cost:
    """A forward takes 1 second, a backward 2."""
    return Cost.uniform(stages, forward=1.0, backward=2.0, kept_bytes=kept_bytes)


@pytest.mark.parametrize("name", KNOWN)
def test_bubble_of_equal_stages_is_the_known_fraction(name: str) -> None:
    for stages in range(1, 7):
        for microbatches in range(stages, 9):
            schedule = get(name).build(stages, microbatches)
            result = simulate(schedule, unit(stages))
            # p-1 microbatches' time passes while the pipeline fills and drains.
            assert result.seconds == 3 * (microbatches + stages - 1)
            for rank, times in enumerate(result.ranks):
                assert times.busy == 3 * microbatches
                assert times.idle == 3 * (stages - 1)
                assert times.bubble == pytest.approx((stages - 1) / (microbatches + stages - 1))
                assert times.finish == result.seconds - 2 * rank


def test_memory_of_the_schedules() -> None:
    cost = unit(4, kept_bytes=10)
    peaks = {name: simulate(get(name).build(4, 6), cost).ranks for name in KNOWN}
    assert [times.peak_bytes for times in peaks["gpipe"]] == [60, 60, 60, 60]
    assert [times.peak_bytes for times in peaks["1f1b"]] == [40, 30, 20, 10]
    assert [times.peak_bytes for times in peaks["eager-1f1b"]] == [60, 50, 30, 10]  # at most as many as microbatches
    assert [times.peak_in_flight for times in peaks["1f1b"]] == [4, 3, 2, 1]


def test_bytes_by_stage() -> None:
    assert peak_bytes(get("1f1b").build(3, 3), {0: 100, 2: 7}) == (300, 0, 7)


def test_unequal_stages_and_transfers() -> None:
    # F0 ends at 1, arrives at 1.5; stage 1: F0 1.5-3.5, B0 3.5-7.5; its gradient arrives at 8; B0 8-10.
    seconds = {(0, Kind.F): 1.0, (0, Kind.B): 2.0, (1, Kind.F): 2.0, (1, Kind.B): 4.0}
    cost = Cost(seconds, transfer=0.5)
    schedule = get("1f1b").build(2, 1)
    for each in (schedule, with_transfers(schedule, [0], [1]), with_transfers(fuse(schedule), [0], [1])):
        result = simulate(each, cost)
        assert result.seconds == 10.0
        assert [(times.busy, times.idle, times.finish) for times in result.ranks] == [
            (3.0, 7.0, 10.0),
            (6.0, 4.0, 7.5),
        ]
        assert result.ranks[0].bubble == 0.7


def test_a_fused_action_may_have_its_own_cost() -> None:
    schedule = fuse(get("1f1b").build(1, 4))
    assert simulate(schedule, Cost({(0, Kind.FB): 2.5})).seconds == 10.0
    assert simulate(schedule, Cost({(0, Kind.F): 1.0, (0, Kind.B): 2.0})).seconds == 12.0


def test_split_backward_fills_the_bubble() -> None:
    # Two stages, one microbatch: stage 0 gets the gradient after I, while W still runs on stage 1.
    rows = ["0F0 0I0 0W0", "1F0 1I0 1W0"]
    schedule = replace(get("1f1b").build(2, 1), ranks=tuple(tuple(map(parse, row.split())) for row in rows))
    result = simulate(schedule, unit(2, kept_bytes=5))
    assert result.seconds == 5.0  # F F I | I W, against F F B B = 6
    assert [times.peak_bytes for times in result.ranks] == [5, 5]


def test_evaluation_and_no_microbatch() -> None:
    schedule = without_backward(get("1f1b").build(3, 4), range(3))
    result = simulate(schedule, unit(3, kept_bytes=1))
    assert result.seconds == 6.0
    assert [times.peak_in_flight for times in result.ranks] == [1, 1, 1]
    empty = simulate(get("1f1b").build(3, 0), unit(3))
    assert (empty.seconds, empty.ranks[0].bubble, empty.ranks[0].peak_in_flight) == (0.0, 0.0, 0)


def test_a_missing_cost_is_named() -> None:
    with pytest.raises(ScheduleError, match="no cost is given for B of stage 0"):
        simulate(get("gpipe").build(1, 1), Cost({(0, Kind.F): 1.0}))


def test_a_schedule_that_cannot_run_is_not_simulated() -> None:
    schedule = get("gpipe").build(1, 1)
    with pytest.raises(ScheduleError, match="0B0 comes before 0F0"):
        simulate(replace(schedule, ranks=(schedule.ranks[0][::-1],)), unit(1))


class TestTimeline(expecttest.TestCase):
    def draw(self, name: str, stages: int, microbatches: int, width: int = 160) -> str:
        schedule = get(name).build(stages, microbatches)
        return timeline(schedule, simulate(schedule, unit(stages)), width=width)

    def test_one_f_one_b(self) -> None:
        self.assertExpectedInline(
            self.draw("1f1b", 3, 4),
            """\
rank 0 |F0 F1 F2 ............B0=== F3 B1=== ...B2=== ...B3=== |
rank 1 |...F0 F1 ......B0=== F2 B1=== F3 B2=== ...B3=== ......|
rank 2 |......F0 B0=== F1 B1=== F2 B2=== F3 B3=== ............|
""",
        )

    def test_gpipe(self) -> None:
        self.assertExpectedInline(
            self.draw("gpipe", 2, 3),
            """\
rank 0 |F0 F1 F2 .........B0=== B1=== B2=== |
rank 1 |...F0 F1 F2 B0=== B1=== B2=== ......|
""",
        )

    def test_narrow(self) -> None:
        self.assertExpectedInline(
            self.draw("1f1b", 2, 6, width=30),
            """\
rank 0 | F ...B0  B1  B2 F B F B4 .B5 |
rank 1 |.F B0  B1  B2 F B3  B4  B5 ...|
""",
        )

    def test_several_stages_of_a_rank_show_the_stage(self) -> None:
        rows = ["0F0 1F0 1B0 0B0"]
        schedule = get("gpipe").build(2, 1)
        schedule = replace(schedule, ranks=tuple(tuple(map(parse, row.split())) for row in rows), placement=(0, 0))
        self.assertExpectedInline(
            timeline(schedule, simulate(schedule, unit(2))),
            """\
rank 0 |0F0 1F0 1B0==== 0B0==== |
""",
        )

    def test_no_microbatch(self) -> None:
        self.assertExpectedInline(
            self.draw("1f1b", 2, 0),
            """\
rank 0 ||
rank 1 ||
""",
        )
