"""Run a schedule without computing anything: who can go on, and who waits for what."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass

from graphcomp.schedule.actions import Action, counterpart
from graphcomp.schedule.dependencies import needs, yields
from graphcomp.schedule.schedule import Schedule

__all__ = ["Progress", "Run", "advance", "cycle"]


@dataclass(frozen=True)
class Progress:
    """How far the ranks came.

    `order`: all actions done, in an order in which they can be done one after the other. `positions[rank]`:
    how many of its actions a rank has done. `waits`: for each rank that stopped before its end, the event
    that never came. `visits`: how often a rank was looked at, at most ranks + actions.
    """

    order: tuple[Action, ...]
    positions: tuple[int, ...]
    waits: dict[int, Action]
    visits: int


def advance(schedule: Schedule, *, blocking: bool) -> Progress:
    """Let every rank go on as far as it can, in time linear in the number of actions.

    `blocking=True`: a send and its receive are done together, once both ranks have come to them (rendezvous).
    `blocking=False`: a send is done at once, and a receive once its send is done.
    """
    run = Run(schedule, blocking)
    run.settle()
    return Progress(tuple(run.order), tuple(run.positions), dict(sorted(run.waits.items())), run.visits)


def cycle(schedule: Schedule, waits: Mapping[int, Action]) -> list[int]:
    """Ranks each of which waits for the next. waits: what each stuck rank waits for.

    There is one where all that is waited for is somewhere in the schedule: it is then on a rank that is stuck too.
    """
    seen: dict[int, None] = {}
    rank = min(waits, default=-1)
    while rank in waits and rank not in seen:
        seen[rank] = None
        rank = schedule.rank_of(waits[rank].stage)
    ranks = list(seen)
    return ranks[ranks.index(rank) :] if rank in seen else []


class Run:
    """A run under way. `ranks`: the actions of each rank; what one has not come to may still change its order."""

    def __init__(self, schedule: Schedule, blocking: bool) -> None:
        self.schedule, self.blocking = schedule, blocking
        self.ranks = [list(actions) for actions in schedule.ranks]
        self.order: list[Action] = []
        self.positions = [0] * len(schedule.ranks)
        self.waits: dict[int, Action] = {}
        self.visits = 0
        self._queue = deque(range(len(schedule.ranks)))
        self._done: set[Action] = set()
        self._sleepers: defaultdict[Action, list[int]] = defaultdict(list)

    def settle(self) -> None:
        """Let every rank go on as far as it can."""
        while self._queue:
            self._go(self._queue.popleft())

    def take_next(self, rank: int, action: Action) -> None:
        """Let a rank do an action, which stands further down, before the one that it waits in."""
        actions, position = self.ranks[rank], self.positions[rank]
        del actions[actions.index(action, position)]
        actions.insert(position, action)
        self._queue.append(rank)

    def head(self, rank: int) -> Action | None:
        """What a rank has to do next; None at its end."""
        actions = self.ranks[rank]
        return actions[self.positions[rank]] if self.positions[rank] < len(actions) else None

    def _go(self, rank: int) -> None:
        """Advance one rank until it has to wait."""
        self.visits += 1
        self.waits.pop(rank, None)
        while (action := self.head(rank)) is not None:
            if self.blocking and action.kind.is_transfer:
                partner = counterpart(action)
                peer = self.schedule.rank_of(partner.stage)
                if self.head(peer) != partner:
                    # Nobody has to be told: the peer sees this rank waiting when it comes to its own half.
                    self.waits[rank] = partner
                    return
                halves = [(rank, action), (peer, partner)]
                for side, half in halves if action.kind.is_send else reversed(halves):
                    self._finish(side, half)
                self._queue.append(peer)
                continue
            missing = next((event for event in needs(self.schedule, action) if event not in self._done), None)
            if missing is not None:
                self.waits[rank] = missing
                self._sleepers[missing].append(rank)
                return
            self._finish(rank, action)

    def _finish(self, rank: int, action: Action) -> None:
        self.positions[rank] += 1
        self.order.append(action)
        for event in yields(action):
            self._done.add(event)
            self._queue.extend(self._sleepers.pop(event, ()))
