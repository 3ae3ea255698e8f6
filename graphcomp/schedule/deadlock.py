"""The error for a deadlock: where every stuck rank stands and what it waits for."""

from __future__ import annotations

from graphcomp.errors import ScheduleError
from graphcomp.schedule.actions import Action
from graphcomp.schedule.dependencies import yields
from graphcomp.schedule.progress import Progress, cycle
from graphcomp.schedule.schedule import Schedule

__all__ = ["deadlock_error"]

_SHOWN = 8  # ranks
_WINDOW = 3  # actions on either side of a rank's position


def deadlock_error(
    schedule: Schedule, progress: Progress, *, blocking: bool, completes_buffered: bool
) -> ScheduleError:
    """Show the ranks that wait for each other first, then others that are stuck, eight at most."""
    circle = cycle(schedule, progress.waits)
    stuck = circle + [rank for rank in progress.waits if rank not in circle]
    lines = [_position(schedule, progress, rank) for rank in stuck[:_SHOWN]]
    if len(stuck) > _SHOWN:
        lines.append(f"and {len(stuck) - _SHOWN} more ranks")
    remedy = (
        "with buffered sends it completes; let one of the ranks receive before it sends" if completes_buffered else None
    )
    return ScheduleError(
        f"deadlock: {' waits for '.join(f'rank {rank}' for rank in [*circle, circle[0]])}",
        where=f"schedule {schedule.name!r}, {'blocking' if blocking else 'buffered'} sends",
        expected="every rank comes to its end",
        got="\n    ".join([f"{len(stuck)} of {len(schedule.ranks)} ranks stand still", *lines]),
        do=remedy,
    )


def _position(schedule: Schedule, progress: Progress, rank: int) -> str:
    actions, at = schedule.ranks[rank], progress.positions[rank]
    first = max(0, at - _WINDOW)
    window = [str(action) for action in actions[first : at + _WINDOW + 1]]
    window[at - first] = f">{window[at - first]}<"
    head = ["..."] * (first > 0)
    tail = ["..."] * (at + _WINDOW + 1 < len(actions))
    peer = schedule.rank_of(progress.waits[rank].stage)
    waits = f"waits for {_awaited(schedule, peer, progress.waits[rank])} (rank {peer})"
    return f"rank {rank} at action {at} of {len(actions)} {waits}: {' '.join([*head, *window, *tail])}"


def _awaited(schedule: Schedule, peer: int, event: Action) -> Action:
    """The action that makes `event` available: `1B0` for `1I0`, unless the schedule splits its backward."""
    return next((action for action in schedule.ranks[peer] if event in yields(action)), event)
