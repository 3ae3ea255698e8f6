"""GPipe: all forwards, then all backwards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from graphcomp.schedule.actions import Action, Kind
from graphcomp.schedule.schedule import Schedule, require_counts, stage_per_rank

__all__ = ["GPipe"]


@dataclass(frozen=True)
class GPipe:
    """All forwards, then all backwards, both in microbatch order.

    Every stage holds all microbatches at its peak. Source: Huang et al., GPipe, 2019.
    """

    name: ClassVar[str] = "gpipe"
    fuses: ClassVar[bool] = False

    def build(self, stages: int, microbatches: int) -> Schedule:
        """The actions for any number of microbatches. Raises ScheduleError for no stage or a negative
        count."""
        require_counts(self.name, stages, microbatches)
        return stage_per_rank(
            self.name,
            microbatches,
            [
                [Action(stage, kind, microbatch) for kind in (Kind.F, Kind.B) for microbatch in range(microbatches)]
                for stage in range(stages)
            ],
        )
