"""Schedules by name."""

from __future__ import annotations

from typing import ClassVar, Protocol

from graphcomp.errors import PlanError
from graphcomp.schedule.eager_one_f_one_b import EagerOneFOneB
from graphcomp.schedule.gpipe import GPipe
from graphcomp.schedule.interleaved import InterleavedOneFOneB
from graphcomp.schedule.one_f_one_b import OneFOneB
from graphcomp.schedule.schedule import Schedule

__all__ = ["KNOWN", "Builder", "get"]


class Builder(Protocol):
    """What a kind of schedule offers: a name, and actions for any number of stages, microbatches and ranks.

    fuses: whether the last stage's backward always follows its own forward, so that they can be one action.
    """

    name: ClassVar[str]
    fuses: ClassVar[bool]

    def build(self, stages: int, microbatches: int, ranks: int | None = None) -> Schedule:
        """The actions of every rank, without transfers. ranks: as many as stages, if not given.

        Raises ScheduleError if the combination has none.
        """
        ...


_BUILDERS: dict[str, Builder] = {
    builder.name: builder for builder in (GPipe(), OneFOneB(), EagerOneFOneB(), InterleavedOneFOneB())
}
KNOWN: tuple[str, ...] = tuple(sorted(_BUILDERS))
"""The names that `get` accepts."""


def get(name: str) -> Builder:
    """The schedule called `name`. Raises PlanError with the known names for any other."""
    builder = _BUILDERS.get(name) if isinstance(name, str) else None
    if builder is None:
        raise PlanError(
            f"there is no schedule {name!r}",
            where="Plan(schedule=...)",
            expected=f"one of {', '.join(KNOWN)}",
            got=repr(name),
        )
    return builder
