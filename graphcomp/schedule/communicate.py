"""Insert the sends and receives of the boundaries that exist."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import replace

from graphcomp.errors import ScheduleError
from graphcomp.schedule.actions import Action, Kind
from graphcomp.schedule.dependencies import crosses_backward, crosses_forward, needs, yields
from graphcomp.schedule.progress import Run, cycle
from graphcomp.schedule.schedule import Schedule

__all__ = ["with_transfers"]


def with_transfers(schedule: Schedule, forward_edges: Iterable[int], backward_edges: Iterable[int]) -> Schedule:
    """Add a send after each producer and a receive before each consumer.

    `forward_edges`: the stages s that send an activation to s+1. `backward_edges`: the stages s that send a
    gradient to s-1. A stage with nothing to train before it has no backward edge. An edge between stages of
    one rank needs no transfer. Raises ScheduleError for an edge that cannot exist and for a schedule that has
    its transfers already.

    The order suits blocking sends too. A receive stands right before its consumer, unless ranks would then wait for
    each other, each in a send or for one: where a rank of such a circle waits to send something to the next, that one
    takes it first. Activations before gradients, then the lowest rank. A runtime with asynchronous sends loses nothing
    by it: it posts receives on its own terms, and waits for each only at its consumer.

        before  rank 1: 1F0 1B0 1F1 1B1
        after   rank 1: 1RECV_F0 1F0 1B0 1RECV_F1 1SEND_B0 1F1 1B1 1SEND_B1
    """
    forward, backward = frozenset(forward_edges), frozenset(backward_edges)
    if schedule.has_transfers:
        raise ScheduleError("the schedule has its transfers already", where=f"schedule {schedule.name!r}")
    _require_edges(schedule, "forward", forward, range(schedule.stages - 1))
    able = {stage for stage in schedule.backward if stage - 1 in schedule.backward}
    _require_edges(schedule, "backward", backward, able)
    edged = replace(schedule, forward_edges=forward, backward_edges=backward)
    run = Run(
        replace(edged, ranks=tuple(tuple(_inserted(edged, actions)) for actions in schedule.ranks)), blocking=True
    )
    run.settle()
    while (found := _to_take(run)) is not None:
        run.take_next(*found)
        run.settle()
    return replace(edged, ranks=tuple(map(tuple, run.ranks)))


def _inserted(schedule: Schedule, actions: Sequence[Action]) -> Iterator[Action]:
    for action in actions:
        yield from (event for event in needs(schedule, action) if event.kind.is_transfer)
        yield action
        yield from _sends(schedule, action)


def _to_take(run: Run) -> tuple[int, Action] | None:
    """A rank of a circle of waiting ranks, and the receive of what the one before it there waits to send to it."""
    receives = [run.waits[rank] for rank in cycle(run.schedule, run.waits)]
    found = [
        (run.schedule.rank_of(one.stage), one) for one in receives if one.kind.is_transfer and not one.kind.is_send
    ]
    return min(found, key=lambda each: (each[1].kind is not Kind.RECV_F, each[0]), default=None)


def _sends(schedule: Schedule, action: Action) -> Iterator[Action]:
    kinds = {event.kind for event in yields(action)}
    if Kind.F in kinds and crosses_forward(schedule, action.stage):
        yield Action(action.stage, Kind.SEND_F, action.microbatch)
    if Kind.I in kinds and crosses_backward(schedule, action.stage):
        yield Action(action.stage, Kind.SEND_B, action.microbatch)


def _require_edges(schedule: Schedule, direction: str, edges: Set[int], able: Iterable[int]) -> None:
    able = sorted(able)
    if not edges <= set(able):
        raise ScheduleError(
            f"a {direction} edge cannot exist",
            where=f"schedule {schedule.name!r}, {schedule.stages} stages",
            expected=f"sending stages among {able}",
            got=sorted(edges),
            do="a backward edge needs a backward on both of its stages" if direction == "backward" else None,
        )
