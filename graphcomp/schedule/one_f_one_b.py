"""1F1B: after a short warm-up, one forward and one backward in turn."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from graphcomp.schedule.actions import Action, Kind
from graphcomp.schedule.schedule import Schedule, dealt, require_counts

__all__ = ["OneFOneB", "in_turn"]


@dataclass(frozen=True)
class OneFOneB:
    """One forward, one backward in turn, after p-1-s forwards of warm-up on stage s of p.

    Stage s holds at most p-s microbatches. Gradients accumulate in microbatch order, as with GPipe. Source:
    Narayanan et al., PipeDream-Flush, 2021.
    """

    name: ClassVar[str] = "1f1b"
    fuses: ClassVar[bool] = True

    def build(self, stages: int, microbatches: int, ranks: int | None = None) -> Schedule:
        """The actions for any number of microbatches. Raises ScheduleError for impossible numbers, and for several
        stages on a rank."""
        require_counts(self.name, stages, microbatches, ranks, several=False)
        orders = [in_turn(stage, stages - 1 - stage, microbatches) for stage in range(stages)]
        return dealt(self.name, stages, microbatches, orders)


def in_turn(stage: int, warmup: int, microbatches: int) -> Iterator[Action]:
    """Forwards of warm-up, if there are as many, then one forward and one backward in turn, then backwards."""
    for microbatch in range(min(warmup, microbatches)):
        yield Action(stage, Kind.F, microbatch)
    for microbatch in range(microbatches):
        if microbatch + warmup < microbatches:
            yield Action(stage, Kind.F, microbatch + warmup)
        yield Action(stage, Kind.B, microbatch)
