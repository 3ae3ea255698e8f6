"""Rank programs do not hold each other up on streams that keep their order."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest

from graphcomp.errors import ScheduleError
from graphcomp.partition.stages import Partitioned
from graphcomp.runtime.program import lower as lowering
from graphcomp.runtime.program import streams
from graphcomp.runtime.program.instructions import RankProgram
from graphcomp.runtime.program.lower import lower
from graphcomp.runtime.program.order import Do, Event, arrange
from graphcomp.schedule.actions import Action
from graphcomp.schedule.registry import KNOWN
from tests.runtime.chain import chain, programs_of, schedule_of
from tests.schedule.test_interleaved import NAMES

SIZES = list(product(range(1, 5), range(1, 4), range(6)))
"""Ranks, stages on each, microbatches."""


def placement(ranks: int, each: int) -> list[int]:
    return [stage % ranks for stage in range(ranks * each)]


def programs(cuts: list[Partitioned], name: str, ranks: int, fused: bool = True) -> list[RankProgram]:
    schedule = schedule_of(cuts[0], name, len(cuts), fused, ranks)
    return [lower(cuts, schedule, rank) for rank in range(ranks)]


@pytest.mark.parametrize("name", KNOWN)
def test_every_size_ends(name: str) -> None:
    for ranks, each, microbatches in SIZES:
        if (each > 1 and name not in NAMES) or not microbatches:
            continue
        stages = ranks * each
        cut, frozen = chain(stages).cut, chain(stages, trainable_from=stages - 1).cut
        messages = 2 * (stages - 1) * microbatches if ranks > 1 else 0
        for fused in (True, False):
            found = programs([cut] * microbatches, name, ranks, fused)
            assert streams.prove(found, placement(ranks, each)) == messages
            # Some are of another specialisation, which sends no gradients.
            mixed = [frozen if number % 3 == 1 else cut for number in range(microbatches)]
            streams.prove(programs(mixed, name, ranks, fused), placement(ranks, each))


@pytest.mark.parametrize("name", NAMES)
def test_shared_gradients_end_too(name: str) -> None:
    """Closing messages share their streams with gradients of activations, and are among those that are proven."""
    for tied in [(0, 2), (1, 2), (0, 3), (0, 1, 2, 3), (1, 3)]:
        made = chain(4, tied=tied)
        for ranks in (1, 2, 4):
            found = programs_of(made, name, 3, ranks=ranks)
            closing = 2 * len({stage % ranks for stage in tied} - {tied[0] % ranks})
            if ranks == 4:
                closing = 2 * (len(tied) - 1)
            elif ranks == 2 and tied == (0, 1, 2, 3):
                closing = 2 + 1  # both stages of the other rank give their shares, and it gets the sum once
            assert streams.prove(found, placement(ranks, 4 // ranks)) == (6 * 3 if ranks > 1 else 0) + closing


def test_one_stream_for_both_directions_would_hold_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Why there are groups for each kind, and two more where a rank holds several stages."""
    two, four = chain(2).cut, chain(4).cut
    plain, several = programs([two] * 4, "1f1b", 2), programs([four] * 4, "interleaved-1f1b", 2)
    monkeypatch.setattr(streams, "way", lambda edge, ranks: "one for all")
    for found, each in ((plain, 1), (several, 2)):
        with pytest.raises(ScheduleError, match="deadlock: ranks wait for messages that are held up"):
            streams.prove(found, placement(2, each))
    monkeypatch.setattr(streams, "way", lambda edge, ranks: edge.source > edge.target)
    streams.prove(plain, placement(2, 1))
    with pytest.raises(ScheduleError, match="held up"):
        streams.prove(several, placement(2, 2))


def test_receives_in_another_order_than_the_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    def other_order(actions: tuple[Action, ...], exists: Callable[[Action], bool]) -> list[Event]:
        """The first two receives of a rank change places."""
        events = arrange(actions, exists)
        posts = [place for place, event in enumerate(events) if event.do is Do.POST]
        if len(posts) > 1:
            first, second = posts[:2]
            events[first], events[second] = events[second], events[first]
        return events

    monkeypatch.setattr(lowering, "arrange", other_order)
    with pytest.raises(ScheduleError) as caught:
        streams.prove(programs([chain(2).cut] * 2, "gpipe", 2), [0, 1])
    assert caught.value.got.splitlines()[0] == "2 of 2 ranks stand still"
    assert "rank 0 at: %" in caught.value.got and "= wait 1>0 of microbatch 0" in caught.value.got
    assert "= wait 0>1 of microbatch 0" in caught.value.got
