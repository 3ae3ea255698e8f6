"""Run a schedule without computing anything: who can go on, and who waits for what."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass

from graphcomp.schedule.actions import Action, counterpart
from graphcomp.schedule.dependencies import needs, yields
from graphcomp.schedule.schedule import Schedule

__all__ = ["Progress", "advance"]


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
    run = _Run(schedule, blocking)
    while run.queue:
        run.go(run.queue.popleft())
    return Progress(tuple(run.order), tuple(run.positions), dict(sorted(run.waits.items())), run.visits)


class _Run:
    def __init__(self, schedule: Schedule, blocking: bool) -> None:
        self.schedule, self.blocking = schedule, blocking
        self.order: list[Action] = []
        self.positions = [0] * len(schedule.ranks)
        self.waits: dict[int, Action] = {}
        self.visits = 0
        self.queue = deque(range(len(schedule.ranks)))
        self._done: set[Action] = set()
        self._sleepers: defaultdict[Action, list[int]] = defaultdict(list)

    def go(self, rank: int) -> None:
        """Advance one rank until it has to wait."""
        self.visits += 1
        self.waits.pop(rank, None)
        while (action := self._head(rank)) is not None:
            if self.blocking and action.kind.is_transfer:
                partner = counterpart(action)
                peer = self.schedule.rank_of(partner.stage)
                if self._head(peer) != partner:
                    # Nobody has to be told: the peer sees this rank waiting when it comes to its own half.
                    self.waits[rank] = partner
                    return
                halves = [(rank, action), (peer, partner)]
                for side, half in halves if action.kind.is_send else reversed(halves):
                    self._finish(side, half)
                self.queue.append(peer)
                continue
            missing = next((event for event in needs(self.schedule, action) if event not in self._done), None)
            if missing is not None:
                self.waits[rank] = missing
                self._sleepers[missing].append(rank)
                return
            self._finish(rank, action)

    def _head(self, rank: int) -> Action | None:
        actions = self.schedule.ranks[rank]
        return actions[self.positions[rank]] if self.positions[rank] < len(actions) else None

    def _finish(self, rank: int, action: Action) -> None:
        self.positions[rank] += 1
        self.order.append(action)
        for event in yields(action):
            self._done.add(event)
            self.queue.extend(self._sleepers.pop(event, ()))
