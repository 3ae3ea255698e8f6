"""Eager 1F1B: 1F1B with a deeper warm-up, so that a transfer has a microbatch's time to arrive."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from graphcomp.schedule.one_f_one_b import in_turn
from graphcomp.schedule.schedule import Schedule, dealt, require_counts

__all__ = ["EagerOneFOneB"]


@dataclass(frozen=True)
class EagerOneFOneB:
    """One forward, one backward in turn, after 2(p-1-s) forwards of warm-up on stage s of p.

    With 1F1B a stage needs the gradient of a microbatch as soon as the next stage has it; here one forward lies in
    between. Stage s holds at most 2(p-1-s)+1 microbatches. Gradients accumulate in microbatch order. Source: Zhuang et
    al., On Optimizing the Communication of Model Parallelism, 2022.
    """

    name: ClassVar[str] = "eager-1f1b"
    fuses: ClassVar[bool] = True

    def build(self, stages: int, microbatches: int, ranks: int | None = None) -> Schedule:
        """The actions for any number of microbatches. Raises ScheduleError for impossible numbers, and for several
        stages on a rank."""
        require_counts(self.name, stages, microbatches, ranks, several=False)
        orders = [in_turn(stage, 2 * (stages - 1 - stage), microbatches) for stage in range(stages)]
        return dealt(self.name, stages, microbatches, orders)
