"""Prove that what ranks start, and wait for, ends on streams that keep their order.

With NCCL all that two ranks exchange over one group is done on both sides in the order in which each started it, a send
and its receive at the same time. Nothing is done before its rank has come to it, and only a wait holds a rank up. That
is less than a rank of the schedule asks for, which waits in a send; but it has streams, and receives in another order.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable

from graphcomp.errors import ScheduleError
from graphcomp.runtime.program.order import Do, Event, arrange, arrivals, edge_of
from graphcomp.runtime.program.transport import way
from graphcomp.schedule.actions import Action, counterpart
from graphcomp.schedule.schedule import Schedule


def prove(schedule: Schedule, exists: Callable[[Action], bool]) -> int:
    """Raise ScheduleError unless every rank comes to its end. Returns how many transfers there are.

    exists: whether an action has anything to do, as for `arrange`. Takes time linear in the number of actions.
    """
    run = _Run(schedule, exists)
    for rank in range(len(schedule.ranks)):
        run.go(rank)
    stuck = [rank for rank, events in enumerate(run.orders) if run.positions[rank] < len(events)]
    if stuck:
        at = (f"rank {rank} at: {run.spelled(rank)}" for rank in stuck)
        raise ScheduleError(
            "deadlock: ranks wait for transfers that are held up by others",
            where=f"schedule {schedule.name!r}, streams in order",
            expected="every rank comes to its end",
            got="\n    ".join([f"{len(stuck)} of {len(run.orders)} ranks stand still", *at]),
        )
    return len(run.done) // 2


class _Run:
    def __init__(self, schedule: Schedule, exists: Callable[[Action], bool]) -> None:
        self.schedule = schedule
        ranks = range(len(schedule.ranks))
        self.orders: list[list[Event]] = [arrange(actions, exists) for actions in schedule.ranks]
        self.finished = [arrivals(schedule, rank, exists) for rank in ranks]
        self.positions = [0 for _ in ranks]
        self.done: set[Action] = set()
        self._queues: defaultdict[object, deque[Action]] = defaultdict(deque)

    def go(self, rank: int) -> None:
        """Let a rank go on, and then those that it held up."""
        ready = [rank]
        while ready:
            rank = ready.pop()
            events = self.orders[rank]
            while self.positions[rank] < len(events):
                event = events[self.positions[rank]]
                if event.do is Do.WAIT and not self._is_through(rank, event.action):
                    break
                self.positions[rank] += 1
                if event.do in (Do.POST, Do.SEND):
                    ready += self._start(rank, event.action)

    def spelled(self, rank: int) -> str:
        event = self.orders[rank][self.positions[rank]]
        return f"{event.do.name.lower()} {event.action}"

    def _is_through(self, rank: int, receive: Action) -> bool:
        """Also the sends that are finished behind it, as they should be proven to have arrived."""
        return self.done.issuperset((receive, *self.finished[rank].get(receive, ())))

    def _start(self, rank: int, action: Action) -> list[int]:
        """Put it into its stream, and do what both sides now have at their heads; returns the ranks to look at."""
        peer = self.schedule.rank_of(counterpart(action).stage)
        stream = way(edge_of(action), self.schedule.placement), frozenset((rank, peer))
        own, other = self._queues[rank, stream], self._queues[peer, stream]
        own.append(action)
        found: list[int] = []
        while own and other and counterpart(own[0]) == other[0]:
            self.done |= {own.popleft(), other.popleft()}
            found = [rank, peer]
        return found
