"""GPipe: all forwards, then all backwards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from graphcomp.schedule.actions import Action, Kind
from graphcomp.schedule.schedule import Schedule, dealt, require_counts

__all__ = ["GPipe"]


@dataclass(frozen=True)
class GPipe:
    """All forwards, then all backwards, both in microbatch order.

    Every stage holds all microbatches at its peak. With several stages on a rank (s on rank s % p), all microbatches go
    through one of them before the first goes through the next. Sources: Huang et al., GPipe, 2019; Lamy-Poirier,
    Breadth-First Pipeline Parallelism, 2023.
    """

    name: ClassVar[str] = "gpipe"
    fuses: ClassVar[bool] = False

    def build(self, stages: int, microbatches: int, ranks: int | None = None) -> Schedule:
        """The actions for any number of microbatches. Raises ScheduleError for impossible numbers, and unless the
        stages are a multiple of the ranks."""
        ranks = require_counts(self.name, stages, microbatches, ranks, several=True)
        orders = []
        for rank in range(ranks):
            own, each = range(rank, stages, ranks), range(microbatches)
            forwards = [Action(stage, Kind.F, microbatch) for stage in own for microbatch in each]
            orders.append(
                forwards + [Action(stage, Kind.B, microbatch) for stage in reversed(own) for microbatch in each]
            )
        return dealt(self.name, stages, microbatches, orders)
