"""A simulated step as text, one row a rank."""

from __future__ import annotations

from graphcomp.schedule.actions import Action
from graphcomp.schedule.schedule import Schedule
from graphcomp.schedule.simulate import Simulation

__all__ = ["timeline"]

_IDLE, _BUSY = ".", "="


def timeline(schedule: Schedule, simulation: Simulation, *, width: int = 160) -> str:
    """Rows of time from left to right: `F0` and `B0===` are actions, dots are idle time; at most `width`
    columns of time.

    The shortest action is drawn as wide as its label and a blank, unless the whole would then not fit; labels
    are cut to their space. A rank with several stages shows the stage (`2F0`).
    """
    shortest = min(
        (span.end - span.start for row in simulation.spans for span in row if span.end > span.start),
        default=0.0,
    )
    if not shortest:
        return "".join(f"rank {rank} ||\n" for rank in range(len(simulation.spans)))
    labels = [[_label(schedule, span.action) for span in row] for row in simulation.spans]
    longest = max(len(label) for row in labels for label in row) + 1
    scale = min(longest / shortest, width / simulation.seconds)
    columns = round(simulation.seconds * scale)
    lines = []
    for rank, (row, names) in enumerate(zip(simulation.spans, labels, strict=True)):
        cells = [_IDLE] * columns
        for span, name in zip(row, names, strict=True):
            first, last = round(span.start * scale), round(span.end * scale)
            space = last - first
            cells[first:last] = list((name.ljust(space - 1, _BUSY)[: space - 1] + " ") if space else "")
        lines.append(f"rank {rank:<{len(str(len(simulation.spans) - 1))}} |{''.join(cells)}|\n")
    return "".join(lines)


def _label(schedule: Schedule, action: Action) -> str:
    alone = len(schedule.stages_of(schedule.rank_of(action.stage))) == 1
    return f"{action.kind.value}{action.microbatch}" if alone else str(action)
