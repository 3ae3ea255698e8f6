"""Ranks as the runtime orders them do not hold each other up on streams that keep their order."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest

from graphcomp.errors import ScheduleError
from graphcomp.runtime.program import streams
from graphcomp.runtime.program.order import Do, Event, arrange
from graphcomp.schedule.actions import Action
from graphcomp.schedule.communicate import with_transfers
from graphcomp.schedule.registry import KNOWN, get
from graphcomp.schedule.rewrite import fuse
from graphcomp.schedule.schedule import Schedule
from tests.schedule.test_interleaved import NAMES


def complete(name: str, ranks: int, each: int, microbatches: int) -> Schedule:
    stages = ranks * each
    return with_transfers(get(name).build(stages, microbatches, ranks), range(stages - 1), range(1, stages))


def always(action: Action) -> bool:
    return True


@pytest.mark.parametrize("name", KNOWN)
def test_every_size_ends(name: str) -> None:
    for ranks, each, microbatches in product(range(1, 5), range(1, 4 if name in NAMES else 2), range(10)):
        schedule = complete(name, ranks, each, microbatches)
        transfers = 2 * (ranks * each - 1) * microbatches if ranks > 1 else 0
        assert streams.prove(schedule, always) == streams.prove(fuse(schedule), always) == transfers
        # Microbatches of another specialisation, with nothing at every other boundary.
        streams.prove(schedule, lambda action: action.microbatch % 3 != 1 or not action.kind.is_transfer)


def test_one_stream_for_both_directions_would_hold_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Why there are groups for each kind, and two more where a rank holds several stages."""
    schedules = complete("1f1b", 2, 1, 4), complete("interleaved-1f1b", 2, 2, 4)
    monkeypatch.setattr(streams, "way", lambda edge, ranks: "one for all")
    for schedule in schedules:
        with pytest.raises(ScheduleError, match="deadlock: ranks wait for transfers that are held up"):
            streams.prove(schedule, always)
    monkeypatch.setattr(streams, "way", lambda edge, ranks: edge.source > edge.target)
    streams.prove(schedules[0], always)
    with pytest.raises(ScheduleError, match="held up"):
        streams.prove(schedules[1], always)


def test_receives_in_another_order_than_the_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    def other_order(actions: tuple[Action, ...], exists: Callable[[Action], bool]) -> list[Event]:
        """The first two receives of a rank change places."""
        events = arrange(actions, exists)
        posts = [place for place, event in enumerate(events) if event.do is Do.POST]
        if len(posts) > 1:
            first, second = posts[:2]
            events[first], events[second] = events[second], events[first]
        return events

    monkeypatch.setattr(streams, "arrange", other_order)
    with pytest.raises(ScheduleError) as caught:
        streams.prove(complete("gpipe", 2, 1, 2), always)
    assert caught.value.got == ("2 of 2 ranks stand still\n    rank 0 at: wait 0RECV_B0\n    rank 1 at: wait 1RECV_F0")
