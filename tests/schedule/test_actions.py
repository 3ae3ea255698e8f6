"""Text form of actions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining.schedules import _Action

from graphcomp.errors import ScheduleError
from graphcomp.schedule import Action, Kind, counterpart, named_stages, parse

numbers = st.integers(0, 10**6)
actions = st.builds(Action, numbers, st.sampled_from(Kind), numbers)


@given(actions)
def test_parse_reads_what_str_writes(action: Action) -> None:
    assert parse(str(action)) == action
    assert parse(f"  {action}\n") == action


@given(actions.filter(lambda action: action.kind is not Kind.FB))
def test_text_is_that_of_torch(action: Action) -> None:
    theirs = _Action.from_str(str(action))
    assert str(theirs) == str(action)
    assert (theirs.stage_index, theirs.computation_type.value, theirs.microbatch_index) == (
        action.stage,
        action.kind.value,
        action.microbatch,
    )


@given(actions.filter(lambda action: action.kind.is_transfer))
def test_each_end_of_a_transfer_is_the_others_counterpart(action: Action) -> None:
    other = counterpart(action)
    assert counterpart(other) == action
    assert other.kind.is_send != action.kind.is_send
    assert abs(other.stage - action.stage) == 1


def test_what_messages_call_the_stages_of_a_rank() -> None:
    assert [named_stages(held) for held in ((), (1,), (1, 3))] == ["stage none", "stage 1", "stages 1, 3"]


def test_counterparts() -> None:
    pairs = {"0SEND_F2": "1RECV_F2", "3SEND_B1": "2RECV_B1"}
    for send, receive in pairs.items():
        assert str(counterpart(parse(send))) == receive


@pytest.mark.parametrize("text", ["", "F0", "0X1", "0F", "0F1F2", "-1F0", "0f1", "0SEND_1", "٠F1", "0 F1"])
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(ScheduleError, match="is not the text of an action") as caught:
        parse(text)
    assert caught.value.got == repr(text)
    assert "SEND_F" in str(caught.value.expected)
