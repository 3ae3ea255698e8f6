"""When receives are posted, and when a send is known to have arrived."""

from __future__ import annotations

import pytest

from graphcomp.runtime.program.order import Do, arrange, arrivals
from graphcomp.schedule.actions import Kind, counterpart
from graphcomp.schedule.communicate import with_transfers
from graphcomp.schedule.registry import KNOWN, get
from graphcomp.schedule.schedule import Schedule


def complete(name: str, stages: int, microbatches: int) -> Schedule:
    return with_transfers(get(name).build(stages, microbatches), range(stages - 1), range(1, stages))


def text(schedule: Schedule, rank: int) -> str:
    events = arrange(schedule.ranks[rank], lambda action: True)
    return " ".join(f"{event.do.name.lower()}:{event.action}" for event in events)


def test_a_receive_is_posted_one_computation_ahead() -> None:
    assert text(complete("1f1b", 2, 2), 1) == (
        "post:1RECV_F0 wait:1RECV_F0 run:1F0 post:1RECV_F1 run:1B0 send:1SEND_B0 "
        "wait:1RECV_F1 run:1F1 run:1B1 send:1SEND_B1"
    )


def test_what_does_not_exist_is_left_out() -> None:
    schedule = complete("1f1b", 2, 2)
    events = arrange(schedule.ranks[1], lambda action: action.microbatch == 1 or action.kind is Kind.F)
    assert [str(event.action) for event in events if event.do is not Do.RUN] == [
        "1RECV_F1",
        "1RECV_F1",
        "1SEND_B1",
    ]


@pytest.mark.parametrize("name", KNOWN)
@pytest.mark.parametrize(("stages", "microbatches"), [(2, 1), (2, 6), (3, 5), (4, 9)])
def test_a_witness_was_sent_after_the_send_had_arrived(name: str, stages: int, microbatches: int) -> None:
    schedule = complete(name, stages, microbatches)
    orders = [arrange(actions, lambda action: True) for actions in schedule.ranks]
    for rank in range(stages):
        for receive, sends in arrivals(schedule, rank, lambda action: True).items():
            peer = orders[counterpart(receive).stage]
            sent = next(i for i, e in enumerate(peer) if e.do is Do.SEND and e.action == counterpart(receive))
            for send in sends:
                waited = next(i for i, e in enumerate(peer) if e.do is Do.WAIT and e.action == counterpart(send))
                assert waited < sent
                # And here the witness is waited for after the send.
                here = orders[rank]
                began = next(i for i, e in enumerate(here) if e.do is Do.SEND and e.action == send)
                assert began < next(i for i, e in enumerate(here) if e.do is Do.WAIT and e.action == receive)


def test_activations_are_released_in_the_steady_state() -> None:
    """With 1F1B every activation a stage sends is known to have arrived before its own gradient comes back,
    or then.
    """
    schedule = complete("1f1b", 4, 8)
    for rank in range(3):
        for receive, sends in arrivals(schedule, rank, lambda action: True).items():
            for send in sends:
                if send.kind is Kind.SEND_F:
                    assert receive.kind is Kind.RECV_B
                    assert receive.microbatch <= send.microbatch
