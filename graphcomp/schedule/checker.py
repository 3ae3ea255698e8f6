"""Prove, before anything runs, that a schedule computes everything once, in a possible order, and does not
deadlock."""

from __future__ import annotations

import textwrap
from collections import defaultdict
from dataclasses import dataclass

from graphcomp.errors import ScheduleError
from graphcomp.schedule.actions import Action, Kind, counterpart
from graphcomp.schedule.deadlock import deadlock_error
from graphcomp.schedule.dependencies import expected_events, needs, yields
from graphcomp.schedule.progress import advance
from graphcomp.schedule.schedule import Schedule

__all__ = ["Proof", "check"]


@dataclass(frozen=True)
class Proof:
    """What `check` has shown: all `actions` complete with this kind of sends. `visits` is the work it
    took."""

    blocking: bool
    actions: int
    visits: int


def check(schedule: Schedule, *, blocking: bool = True) -> Proof:
    """Prove that the schedule completes; raise ScheduleError, showing the ranks' positions, if it does not.

    - Every stage runs every microbatch exactly once, forward before backward; every transfer that an edge
      asks for is there exactly once, a send after its producer, a receive before its consumer.
    - On every channel (one for each sending rank, receiving rank and direction) the order of sends is that of
      receives.
    - No deadlock. `blocking=True`: a send waits for its receive (rendezvous). `blocking=False`: a send never
      waits. What completes with blocking sends completes with buffered ones as well.

    Takes time linear in the number of actions. Without transfers, stages depend directly on their neighbours.
    """
    _check_shape(schedule)
    places = _check_actions(schedule)
    _check_complete(schedule, places)
    _check_local_order(schedule, places)
    _check_channels(schedule)
    progress = advance(schedule, blocking=blocking)
    if progress.waits:
        buffered = blocking and not advance(schedule, blocking=False).waits
        raise deadlock_error(schedule, progress, blocking=blocking, completes_buffered=buffered)
    return Proof(blocking, len(progress.order), progress.visits)


@dataclass(frozen=True)
class _Place:
    rank: int
    position: int
    action: Action


def _check_shape(schedule: Schedule) -> None:
    stages, ranks = schedule.stages, len(schedule.ranks)
    backward = schedule.backward
    forward_edges, backward_edges = schedule.forward_edges, schedule.backward_edges
    placed = len(schedule.placement) == stages and all(0 <= rank < ranks for rank in schedule.placement)
    able = {stage for stage in backward if stage - 1 in backward}
    facts = {
        f"a placement of {stages} stages on ranks 0..{ranks - 1}": placed,
        "backward stages among the stages": backward <= set(range(stages)),
        "both forward and backward edges, or neither": (forward_edges is None) == (backward_edges is None),
        f"forward edges among stages 0..{stages - 2}": (forward_edges or frozenset()) <= set(range(stages - 1)),
        "backward edges between two stages with a backward": (backward_edges or frozenset()) <= able,
    }
    for expected, holds in facts.items():
        if not holds:
            raise ScheduleError(
                "a schedule contradicts itself",
                where=f"schedule {schedule.name!r}",
                expected=expected,
                got=f"placement {schedule.placement}, {_facts(schedule)}",
            )


def _check_actions(schedule: Schedule) -> dict[Action, _Place]:
    """Every action belongs to its rank, and nothing happens twice. Returns who makes each event available."""
    places: dict[Action, _Place] = {}
    for rank, actions in enumerate(schedule.ranks):
        for position, action in enumerate(actions):
            place = _Place(rank, position, action)
            if not (action.stage < schedule.stages and schedule.rank_of(action.stage) == rank):
                raise ScheduleError(
                    f"{action} is on a rank that does not hold stage {action.stage}",
                    where=_where(schedule, place),
                    expected=f"stages {list(schedule.stages_of(rank))}",
                    got=f"stage {action.stage}",
                )
            for event in yields(action):
                if event in places:
                    what = f"{action} does again what {places[event].action} did"
                    where, first = _where(schedule, place), _where(schedule, places[event])
                    raise ScheduleError(what, where=where, got=first)
                places[event] = place
    return places


def _check_complete(schedule: Schedule, places: dict[Action, _Place]) -> None:
    expected = dict.fromkeys(expected_events(schedule))
    for event in expected:
        if event not in places:
            rank = schedule.rank_of(event.stage)
            found = [action for action in schedule.ranks[rank] if action.stage == event.stage]
            raise ScheduleError(
                f"{_spelled(event, found)} is missing",
                where=f"schedule {schedule.name!r}, rank {rank}",
                expected=f"every microbatch 0..{schedule.microbatches - 1} exactly once",
                got=textwrap.shorten(" ".join(map(str, found)) or "nothing", 400),
            )
    for event, place in places.items():
        if event not in expected:
            raise ScheduleError(
                f"{place.action} has no place in this schedule",
                where=_where(schedule, place),
                expected=f"microbatches below {schedule.microbatches}, {_facts(schedule)}",
            )


def _check_local_order(schedule: Schedule, places: dict[Action, _Place]) -> None:
    """What an action needs from its own rank stands before it there."""
    for rank, actions in enumerate(schedule.ranks):
        for position, action in enumerate(actions):
            for event in needs(schedule, action):
                place = places[event]
                if place.rank == rank and place.position > position:
                    raise ScheduleError(
                        f"{action} comes before {place.action}, which it needs",
                        where=_where(schedule, _Place(rank, position, action)),
                        got=_where(schedule, place),
                    )


def _check_channels(schedule: Schedule) -> None:
    sent: defaultdict[tuple[int, int, Kind], list[Action]] = defaultdict(list)
    received: defaultdict[tuple[int, int, Kind], list[Action]] = defaultdict(list)
    for rank, actions in enumerate(schedule.ranks):
        for action in actions:
            if not action.kind.is_transfer:
                continue
            partner = counterpart(action)
            peer = schedule.rank_of(partner.stage)
            if action.kind.is_send:
                sent[rank, peer, action.kind].append(action)
            else:
                received[peer, rank, partner.kind].append(partner)
    for channel in sent:
        for number, (send, match) in enumerate(zip(sent[channel], received[channel], strict=True)):
            if send != match:
                source, target, _ = channel
                raise ScheduleError(
                    f"rank {source} sends in another order than rank {target} receives",
                    where=f"schedule {schedule.name!r}, transfer {number} from {source} to {target}",
                    expected=f"{counterpart(send)} for {send}",
                    got=counterpart(match),
                )


def _spelled(event: Action, found: list[Action]) -> Action:
    """A missing event as the action that is missing: `1B0` for `1I0`, if the stage has whole backwards."""
    halves = (Kind.I, Kind.W)
    whole = event.kind in halves and not any(action.kind in halves for action in found)
    return Action(event.stage, Kind.B, event.microbatch) if whole else event


def _facts(schedule: Schedule) -> str:
    sets = {
        "backward stages": schedule.backward,
        "forward edges": schedule.forward_edges,
        "backward edges": schedule.backward_edges,
    }
    return ", ".join(f"{name} {'none yet' if held is None else sorted(held)}" for name, held in sets.items())


def _where(schedule: Schedule, place: _Place) -> str:
    return f"schedule {schedule.name!r}, rank {place.rank}, action {place.position}: {place.action}"
