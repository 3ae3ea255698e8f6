"""What each action of a schedule waits for, and what it makes available.

Both are written as actions of the smallest kinds: `B` makes `I` and `W` available, `FB` makes `F`, `I` and
`W` available. So whoever waits for a stage's input gradient waits for its `I`, whichever action computes it.
"""

from __future__ import annotations

from collections.abc import Iterator

from graphcomp.schedule.actions import Action, Kind, counterpart
from graphcomp.schedule.schedule import Schedule

__all__ = ["expected_events", "needs", "yields"]

_PARTS = {Kind.B: (Kind.I, Kind.W), Kind.FB: (Kind.F, Kind.I, Kind.W)}


def yields(action: Action) -> tuple[Action, ...]:
    """The events that `action` makes available once it is done."""
    if action.kind not in _PARTS:
        return (action,)
    return tuple(Action(action.stage, kind, action.microbatch) for kind in _PARTS[action.kind])


def needs(schedule: Schedule, action: Action) -> tuple[Action, ...]:
    """The events that `action` waits for, those of its own rank included."""
    stage, microbatch = action.stage, action.microbatch
    match action.kind:
        case Kind.F:
            return _activation(schedule, stage, microbatch)
        case Kind.B | Kind.I:
            return (Action(stage, Kind.F, microbatch), *_gradient(schedule, stage, microbatch))
        case Kind.FB:
            return _activation(schedule, stage, microbatch) + _gradient(schedule, stage, microbatch)
        case Kind.W:
            return (Action(stage, Kind.I, microbatch),)
        case Kind.SEND_F:
            return (Action(stage, Kind.F, microbatch),)
        case Kind.SEND_B:
            return (Action(stage, Kind.I, microbatch),)
        case _:
            return (counterpart(action),)


def expected_events(schedule: Schedule) -> Iterator[Action]:
    """Every event that must happen exactly once in a step."""
    for stage in range(schedule.stages):
        kinds = [Kind.F]
        if stage in schedule.backward:
            kinds += [Kind.I, Kind.W]
        if crosses_forward(schedule, stage):
            kinds.append(Kind.SEND_F)
        if crosses_forward(schedule, stage - 1):
            kinds.append(Kind.RECV_F)
        if crosses_backward(schedule, stage):
            kinds.append(Kind.SEND_B)
        if crosses_backward(schedule, stage + 1):
            kinds.append(Kind.RECV_B)
        for kind in kinds:
            for microbatch in range(schedule.microbatches):
                yield Action(stage, kind, microbatch)


def crosses_forward(schedule: Schedule, stage: int) -> bool:
    """True if the schedule has a send from `stage` to the next one: the edge exists and its ends are on two
    ranks."""
    edges = schedule.forward_edges or ()
    return stage in edges and schedule.rank_of(stage) != schedule.rank_of(stage + 1)


def crosses_backward(schedule: Schedule, stage: int) -> bool:
    """True if the schedule has a send from `stage` to the previous one."""
    edges = schedule.backward_edges or ()
    return stage in edges and schedule.rank_of(stage) != schedule.rank_of(stage - 1)


def _activation(schedule: Schedule, stage: int, microbatch: int) -> tuple[Action, ...]:
    """What the forward of a stage waits for: the receive, or the previous stage where there is none
    between."""
    if crosses_forward(schedule, stage - 1):
        return (Action(stage, Kind.RECV_F, microbatch),)
    edges = range(schedule.stages - 1) if schedule.forward_edges is None else schedule.forward_edges
    return (Action(stage - 1, Kind.F, microbatch),) if stage - 1 in edges else ()


def _gradient(schedule: Schedule, stage: int, microbatch: int) -> tuple[Action, ...]:
    """What the backward of a stage waits for beyond its own forward."""
    if crosses_backward(schedule, stage + 1):
        return (Action(stage, Kind.RECV_B, microbatch),)
    edges = schedule.backward - {0} if schedule.backward_edges is None else schedule.backward_edges
    return (Action(stage + 1, Kind.I, microbatch),) if stage + 1 in edges else ()
