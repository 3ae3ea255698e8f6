"""Prove that what ranks start, and wait for, ends on streams that keep their order.

With NCCL all that two ranks exchange over one group is done on both sides in the order in which each started it, a send
and its receive at the same time. Nothing is done before its rank has come to it, and only a wait holds a rank up. That
is less than a rank of the schedule asks for, which waits in a send; but it has streams, and receives in another order.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable, Iterator, Sequence

from graphcomp.errors import ScheduleError
from graphcomp.runtime.program.instructions import (
    Edge,
    FinishSend,
    FinishSends,
    Instruction,
    PostReceive,
    RankProgram,
    Send,
    SendGradient,
    WaitReceive,
)
from graphcomp.runtime.program.transport import way

_Message = tuple[Edge, Hashable]
"""An edge, and a microbatch or the shared parameter whose gradient is sent."""


def prove(programs: Sequence[RankProgram], placement: Sequence[int]) -> int:
    """Raise ScheduleError unless every rank comes to its end. Returns how many messages there are.

    programs: of all ranks of a pipeline. placement: the rank of each stage. Takes time linear in the number of
    instructions.
    """
    run = _Run(programs, placement)
    for rank in range(len(programs)):
        run.go(rank)
    stuck = [rank for rank, steps in enumerate(run.orders) if run.positions[rank] < len(steps)]
    if stuck:
        at = (f"rank {rank} at: {run.orders[rank][run.positions[rank]]}" for rank in stuck)
        raise ScheduleError(
            "deadlock: ranks wait for messages that are held up by others",
            where="rank programs, streams in order",
            expected="every rank comes to its end",
            got="\n    ".join([f"{len(stuck)} of {len(run.orders)} ranks stand still", *at]),
        )
    return len(run.done)


class _Run:
    def __init__(self, programs: Sequence[RankProgram], placement: Sequence[int]) -> None:
        self.placement = placement
        self.orders = [list(_transfers(program)) for program in programs]
        self.positions = [0 for _ in programs]
        self.done: set[_Message] = set()
        # What each rank has started under a slot, and all that it has sent.
        self._slots: list[dict[int, _Message]] = [{} for _ in programs]
        self._sent: list[set[_Message]] = [set() for _ in programs]
        self._queues: defaultdict[object, deque[_Message]] = defaultdict(deque)

    def go(self, rank: int) -> None:
        """Let a rank go on, and then those that it held up."""
        ready = [rank]
        while ready:
            rank = ready.pop()
            steps = self.orders[rank]
            while self.positions[rank] < len(steps):
                step = steps[self.positions[rank]]
                if not self._may_pass(rank, step):
                    break
                self.positions[rank] += 1
                if isinstance(step, PostReceive | Send | SendGradient):
                    ready += self._start(rank, step)

    def _may_pass(self, rank: int, step: Instruction) -> bool:
        match step:
            case WaitReceive() | FinishSend():
                return self._slots[rank][step.slot] in self.done
            case FinishSends():
                return self._sent[rank] <= self.done
        return True

    def _start(self, rank: int, step: PostReceive | Send | SendGradient) -> list[int]:
        """Put it into its stream, and do what both sides now have at their heads; returns the ranks to look at."""
        receives = isinstance(step, PostReceive)
        key = step.values[0].name if isinstance(step, SendGradient) or step.microbatch is None else step.microbatch
        message = self._slots[rank][step.slot] = (step.edge, key)
        if not receives:
            self._sent[rank].add(message)
        peer = self.placement[step.edge.source if receives else step.edge.target]
        stream = way(step.edge, self.placement), frozenset((rank, peer))
        own, other = self._queues[rank, stream], self._queues[peer, stream]
        own.append(message)
        found: list[int] = []
        while own and other and own[0] == other[0]:
            self.done.add(own.popleft())
            other.popleft()
            found = [rank, peer]
        return found


def _transfers(program: RankProgram) -> Iterator[Instruction]:
    kinds = (PostReceive, WaitReceive, Send, SendGradient, FinishSend, FinishSends)
    return (step for step in program.instructions if isinstance(step, kinds))
