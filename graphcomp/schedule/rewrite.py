"""Rewrites of schedules that change what is run, not what is computed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from graphcomp.errors import ScheduleError
from graphcomp.schedule.actions import Action, Kind
from graphcomp.schedule.dependencies import needs
from graphcomp.schedule.schedule import Schedule

__all__ = ["fuse", "without_backward"]

_BACKWARD = frozenset({Kind.B, Kind.I, Kind.W})


def fuse(schedule: Schedule) -> Schedule:
    """Turn each F that its own B follows at once into one FB, which saves nothing in between.

    Sound where the backward waits for no gradient from another stage: always so for the last stage of 1F1B.

        before  rank 1: 1F0 1B0 1F1 1B1        after  rank 1: 1FB0 1FB1
    """
    return replace(schedule, ranks=tuple(tuple(_fused(schedule, actions)) for actions in schedule.ranks))


def _fused(schedule: Schedule, actions: Sequence[Action]) -> Iterator[Action]:
    position = 0
    while position < len(actions):
        action = actions[position]
        backward = Action(action.stage, Kind.B, action.microbatch)
        follows = position + 1 < len(actions) and actions[position + 1] == backward
        if action.kind is Kind.F and follows and needs(schedule, backward) == (action,):
            yield Action(action.stage, Kind.FB, action.microbatch)
            position += 2
        else:
            yield action
            position += 1


def without_backward(schedule: Schedule, stages: Iterable[int]) -> Schedule:
    """Drop the backwards of `stages`: those with nothing to train before or in them, or all of them for
    evaluation.

    Raises ScheduleError for a stage that does not exist and for a schedule that is fused or has its transfers
    already.
    """
    dropped = frozenset(stages)
    if not dropped <= frozenset(range(schedule.stages)):
        raise ScheduleError(
            "a backward cannot be dropped from a stage that does not exist",
            where=f"schedule {schedule.name!r}",
            expected=f"stages among 0..{schedule.stages - 1}",
            got=sorted(dropped),
        )
    fused = any(action.kind is Kind.FB for actions in schedule.ranks for action in actions)
    if schedule.has_transfers or fused:
        raise ScheduleError(
            "backwards can be dropped only from a schedule without transfers and fused actions",
            where=f"schedule {schedule.name!r}",
            do="drop the backwards first, then insert transfers, then fuse",
        )
    kept = (
        tuple(action for action in actions if action.kind not in _BACKWARD or action.stage not in dropped)
        for actions in schedule.ranks
    )
    return replace(schedule, ranks=tuple(kept), backward=schedule.backward - dropped)
