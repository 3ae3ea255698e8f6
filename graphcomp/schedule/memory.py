"""How much a schedule holds at once."""

from __future__ import annotations

from collections.abc import Mapping

from graphcomp.schedule.actions import Kind
from graphcomp.schedule.dependencies import yields
from graphcomp.schedule.schedule import Schedule

__all__ = ["peak_bytes", "peak_in_flight"]


def peak_in_flight(schedule: Schedule) -> tuple[int, ...]:
    """For every rank the most microbatches, over all its stages, between their forward and the end of their
    backward.

    A fused FB counts as one while it runs, and so does the forward of a stage that has no backward.
    """
    return peak_bytes(schedule, dict.fromkeys(range(schedule.stages), 1))


def peak_bytes(schedule: Schedule, kept_bytes: Mapping[int, int]) -> tuple[int, ...]:
    """For every rank the most bytes of saved values, when one microbatch on stage s keeps `kept_bytes[s]`
    bytes."""
    peaks = []
    for actions in schedule.ranks:
        held = peak = 0
        for action in actions:
            kinds = {event.kind for event in yields(action)}
            size = kept_bytes.get(action.stage, 0)
            if Kind.F in kinds:
                held += size
                peak = max(peak, held)
            if Kind.W in kinds or (Kind.F in kinds and action.stage not in schedule.backward):
                held -= size
        peaks.append(peak)
    return tuple(peaks)
