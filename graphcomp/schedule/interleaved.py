"""Interleaved 1F1B: several stages on a rank, so that the pipeline fills and drains in smaller pieces."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from graphcomp.schedule.actions import Action, Kind
from graphcomp.schedule.schedule import Schedule, dealt, require_counts

__all__ = ["InterleavedOneFOneB"]


@dataclass(frozen=True)
class InterleavedOneFOneB:
    """One forward, one backward in turn, with v stages on each of p ranks: stage s on rank s % p.

    Microbatches go in rounds, as equal as can be, of at least p where there are as many. A rank takes a round through
    its first stage, then through its second one, and so on; backwards the other way round. On rank r the forwards are
    ahead of the backwards by (v-1) rounds' microbatches and 2(p-1-r), so it holds at most that many and one more, each
    of one stage. Gradients accumulate in microbatch order. Source: Narayanan et al., Efficient Large-Scale Language
    Model Training on GPU Clusters, 2021; for any number of microbatches as in torch.distributed.pipelining.
    """

    name: ClassVar[str] = "interleaved-1f1b"
    fuses: ClassVar[bool] = True

    def build(self, stages: int, microbatches: int, ranks: int | None = None) -> Schedule:
        """The actions for any number of microbatches. Raises ScheduleError for impossible numbers, and unless the
        stages are a multiple of the ranks."""
        ranks = require_counts(self.name, stages, microbatches, ranks, several=True)
        rounds = list(_rounds(microbatches, max(1, microbatches // ranks)))
        return dealt(self.name, stages, microbatches, [_order(rank, ranks, stages, rounds) for rank in range(ranks)])


def _rounds(microbatches: int, number: int) -> Iterator[range]:
    """The larger ones last: a rank then never has to let a forward of theirs wait for its backward's turn."""
    size, larger = divmod(microbatches, number)
    begin = 0
    for place in range(number):
        end = begin + size + (place >= number - larger)
        yield range(begin, end)
        begin = end


def _order(rank: int, ranks: int, stages: int, rounds: Sequence[range]) -> Iterator[Action]:
    own = range(rank, stages, ranks)
    forwards = [Action(stage, Kind.F, microbatch) for each in rounds for stage in own for microbatch in each]
    done = backwards = 0
    for each in rounds:
        lead = (len(own) - 1) * len(each) + 2 * (ranks - 1 - rank)
        for stage in reversed(own):
            for microbatch in each:
                due = min(backwards + lead + 1, len(forwards))
                yield from forwards[done:due]
                yield Action(stage, Kind.B, microbatch)
                done, backwards = max(done, due), backwards + 1
