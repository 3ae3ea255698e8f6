"""The table of a schedule, and reading it back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphcomp.errors import ScheduleError
from graphcomp.schedule import KNOWN, Action, Kind, Schedule, fuse, get, with_transfers, without_backward


@given(
    st.sampled_from(KNOWN),
    st.integers(1, 6),
    st.integers(0, 6),
    st.integers(0, 6),
    st.booleans(),
    st.booleans(),
)
def test_text_reads_back(name: str, stages: int, microbatches: int, frozen: int, inserted: bool, fused: bool) -> None:
    frozen = min(frozen, stages)
    schedule = without_backward(get(name).build(stages, microbatches), range(frozen))
    if inserted:
        schedule = with_transfers(schedule, range(stages - 1), range(frozen + 1, stages))
    if fused:
        schedule = fuse(schedule)
    assert Schedule.from_text(schedule.text()) == schedule
    assert str(schedule) == schedule.text()


def test_several_stages_of_a_rank_read_back() -> None:
    actions = tuple(Action(stage, Kind.F, 0) for stage in (0, 2))
    schedule = Schedule("mine", 3, 1, (actions, (Action(1, Kind.F, 0),), ()), (0, 1, 0), frozenset())
    text = "mine: 3 stages, 1 microbatch\nbackward stages: none\n"
    text += "rank 0 (stages 0 2): 0F0 2F0\nrank 1 (stage 1): 1F0\nrank 2 (no stage):\n"
    assert schedule.text() == text
    assert Schedule.from_text(text) == schedule
    assert [schedule.stages_of(rank) for rank in range(3)] == [(0, 2), (1,), ()]


@pytest.mark.parametrize(
    ("text", "where", "got"),
    [
        ("", "line 1", "''"),
        ("gpipe", "line 1", "'gpipe'"),
        ("a: 1 stage, 1 microbatch\nrank 1 (stage 0): 0F0", "line 2", "'rank 1 (stage 0): 0F0'"),
        ("a: 1 stage, 1 microbatch\nbackward stages: x\n", "line 2", "'backward stages: x'"),
        (
            "a: 1 stage, 0 microbatches\nrank 0 (stage 0):\nbackward stages: none",
            "line 3",
            "'backward stages: none'",
        ),
    ],
)
def test_a_line_that_does_not_fit(text: str, where: str, got: str) -> None:
    with pytest.raises(ScheduleError, match="does not fit") as caught:
        Schedule.from_text(text)
    assert (caught.value.where, caught.value.got) == (where, got)


def test_a_stage_without_rank() -> None:
    with pytest.raises(ScheduleError, match="do not hold its stages") as caught:
        Schedule.from_text("a: 2 stages, 0 microbatches\nrank 0 (stage 0):\n")
    assert (caught.value.expected, caught.value.got) == ("stages 0..1, each on one rank", "stages [0]")


def test_a_word_that_is_no_action() -> None:
    with pytest.raises(ScheduleError, match="'0G0' is not the text of an action"):
        Schedule.from_text("a: 1 stage, 1 microbatch\nrank 0 (stage 0): 0G0\n")
