"""The order of posts, waits, runs and sends on a rank, and where a send is known to have arrived."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from graphcomp.runtime.program.instructions import Edge
from graphcomp.schedule.actions import Action, Kind, counterpart
from graphcomp.schedule.schedule import Schedule


class Do(Enum):
    """What happens at an event."""

    POST = auto()
    WAIT = auto()
    RUN = auto()
    SEND = auto()


@dataclass(frozen=True, slots=True)
class Event:
    """One happening on a rank: `action` is a receive for POST and WAIT, a send for SEND, a computation for
    RUN.
    """

    do: Do
    action: Action


_RECEIVES = {
    Kind.F: (Kind.RECV_F,),
    Kind.B: (Kind.RECV_B,),
    Kind.I: (Kind.RECV_B,),
    Kind.FB: (Kind.RECV_F, Kind.RECV_B),
}
_SENDS = {
    Kind.F: (Kind.SEND_F,),
    Kind.B: (Kind.SEND_B,),
    Kind.I: (Kind.SEND_B,),
    Kind.FB: (Kind.SEND_F, Kind.SEND_B),
}


def arrange(actions: Sequence[Action], exists: Callable[[Action], bool]) -> list[Event]:
    """The events of a rank: each receive is posted one computation ahead and waited for where it is used; a
    send starts right after its computation. `exists` tells whether an action has anything to do for its
    microbatch. `streams.prove` shows that ranks in this order do not hold each other up.
    """
    present = {action for action in actions if exists(action)}
    runs = [action for action in actions if not action.kind.is_transfer and action in present]

    def transfers(run: Action, kinds: dict[Kind, tuple[Kind, ...]]) -> list[Action]:
        named = (Action(run.stage, kind, run.microbatch) for kind in kinds.get(run.kind, ()))
        return [action for action in named if action in present]

    receives = [transfers(run, _RECEIVES) for run in runs]
    events = [Event(Do.POST, action) for action in (receives[0] if runs else ())]
    for number, run in enumerate(runs):
        events += [Event(Do.POST, action) for action in (receives[number + 1] if number + 1 < len(runs) else ())]
        events += [Event(Do.WAIT, action) for action in receives[number]]
        events.append(Event(Do.RUN, run))
        events += [Event(Do.SEND, action) for action in transfers(run, _SENDS)]
    return events


def edge_of(transfer: Action) -> Edge:
    """Between which stages a send or a receive goes."""
    other = counterpart(transfer).stage
    return Edge(transfer.stage, other) if transfer.kind.is_send else Edge(other, transfer.stage)


def arrivals(schedule: Schedule, rank: int, exists: Callable[[Action], bool]) -> dict[Action, list[Action]]:
    """For each receive of `rank`: the sends of this rank that its peer had certainly received when it sent
    that.

    A message that the peer sent after it had waited for ours proves that ours has arrived.
    """
    proven: dict[Action, list[Action]] = defaultdict(list)
    peers: dict[int, _Peer] = {}
    for event in arrange(schedule.ranks[rank], exists):
        if event.do is not Do.SEND:
            continue
        received = counterpart(event.action)
        peer = schedule.rank_of(received.stage)
        if peer not in peers:
            peers[peer] = _Peer.of(schedule, peer, rank, exists)
        witness = peers[peer].first_send_after(received)
        if witness is not None:
            proven[counterpart(witness)].append(event.action)
    return proven


@dataclass(frozen=True)
class _Peer:
    """A neighbour's waits by place, and the places of its sends to us."""

    waits: dict[Action, int]
    places: list[int]
    sends: list[Action]

    @classmethod
    def of(cls, schedule: Schedule, peer: int, rank: int, exists: Callable[[Action], bool]) -> _Peer:
        events = list(enumerate(arrange(schedule.ranks[peer], exists)))
        sends = [
            (place, event.action)
            for place, event in events
            if event.do is Do.SEND and schedule.rank_of(counterpart(event.action).stage) == rank
        ]
        waits = {event.action: place for place, event in events if event.do is Do.WAIT}
        return cls(waits, [place for place, _ in sends], [action for _, action in sends])

    def first_send_after(self, received: Action) -> Action | None:
        found = bisect_right(self.places, self.waits[received])
        return self.sends[found] if found < len(self.sends) else None
