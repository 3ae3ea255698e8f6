"""Agreement: before a step the ranks compare, on the host, what each is about to do; a failure of one ends it on all.

It runs over the gloo side group and never touches a device. Where there is one rank only, there is nothing to compare.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from graphcomp.errors import AgreementError, RankFailure
from graphcomp.runtime.layout import Layout

_MASK = (1 << 62) - 1


@dataclass(frozen=True)
class Intent:
    """What a rank is about to do in a step, in numbers that are alike in every process.

    common: what all ranks of the job must have in common. own: what the ranks of one pipeline must, besides.
    text: both in words. contribution: stands for what this pipeline adds to the sums over data ranks (see
    `dataparallel.contribution`). microbatches: how many it has. is_new: it cannot run this before all ranks prepare.
    """

    common: Hashable = ()
    own: Hashable = ()
    text: str = ""
    contribution: int = 0
    microbatches: int = 0
    is_new: bool = False


@dataclass(frozen=True)
class DataRank:
    """What one pipeline said: `contribution` and `microbatches` as in its `Intent`."""

    contribution: int
    microbatches: int


class Agreement:
    """What the ranks tell each other before a step. Every rank calls the same methods in the same order."""

    def __init__(self, layout: Layout) -> None:
        self.side, self.lines = layout.side, layout.lines
        self.place = layout.lines[layout.data_rank][layout.rank] if layout.lines else 0

    def compare(self, intent: Intent, failure: Exception | None = None) -> tuple[tuple[DataRank, ...], bool]:
        """One small exchange at the beginning of each step: all data ranks, and whether any rank is new.

        failure: why this rank cannot take part. Raises RankFailure where another rank has failed, and AgreementError,
        on all ranks, if they would not do the same. Returns on the rank that failed, which raises its own error.
        """
        if self.side is None:
            return (DataRank(intent.contribution, intent.microbatches),), intent.is_new
        own = [
            failure is not None,
            hash(intent.common) & _MASK,
            hash(intent.own) & _MASK,
            intent.contribution,
            intent.microbatches,
            intent.is_new,
        ]
        everyone = torch.empty(dist.get_world_size(self.side) * len(own), dtype=torch.int64)
        dist.all_gather_single(everyone, torch.tensor(own), group=self.side)
        rows = everyone.view(-1, len(own)).tolist()
        failed = any(row[0] for row in rows)
        alike = len({row[1] for row in rows}) == 1
        alike = alike and all(len({rows[member][2] for member in line}) == 1 for line in self.lines)
        if failed or not alike:
            self.share(intent.text, failure, "take part in the step", everywhere=len({row[1] for row in rows}) > 1)
        firsts = [rows[line[0]] for line in self.lines]
        return tuple(DataRank(row[3], row[4]) for row in firsts), any(row[5] for row in rows)

    def of_the_first(self, values: torch.Tensor) -> torch.Tensor:
        """The host tensor that the job's first rank has, on all of them."""
        if self.side is not None:
            dist.broadcast(values, group=self.side, group_src=0)
        return values

    def share(
        self, text: str, failure: Exception | None, what: str, more: object = None, everywhere: bool = False
    ) -> list[list[Any]]:
        """Compare texts, line by line, within each pipeline, or over all ranks; raises as `compare` does.

        Returns what each rank gave as `more`: a list for every pipeline, in order of data ranks; the rank that failed
        gets an empty list.
        """
        if self.side is None:
            return [[more]]
        digest = hashlib.sha256(text.encode()).hexdigest()
        everyone: list[Any] = [None] * dist.get_world_size(self.side)
        mine = (digest, None if failure is None else f"{type(failure).__name__}: {failure}", more)
        dist.all_gather_object(everyone, mine, group=self.side)
        error = next(((rank, said) for rank, (_, said, _) in enumerate(everyone) if said is not None), None)
        if failure is not None:
            return []
        if error is not None:
            raise RankFailure(f"rank {error[0]} could not {what}", where=f"rank {error[0]}", got=error[1])
        groups = [range(len(everyone))] if everywhere else self.lines
        different = [group for group in groups if len({everyone[member][0] for member in group}) > 1]
        if different:
            self._differ(text, different, [one[0] for one in everyone])
        return [[everyone[member][2] for member in line] for line in self.lines]

    def _differ(self, text: str, groups: Sequence[Sequence[int]], digests: Sequence[str]) -> None:
        texts: list[Any] = [None] * len(digests)
        dist.all_gather_object(texts, text, group=self.side)
        me = self.place
        group = next((group for group in groups if me in group), groups[0])
        first = me if me in group else group[0]
        other = next(member for member in group if digests[member] != digests[first])
        mine, theirs = texts[first].splitlines(), texts[other].splitlines()
        place = next(
            (i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), min(len(mine), len(theirs))
        )
        own, their = (lines[place].strip() if place < len(lines) else "nothing more" for lines in (mine, theirs))
        raise AgreementError(
            "the ranks would not do the same",
            where=f"ranks {first} and {other}",
            expected=f"{own} (rank {first})",
            got=f"{their} (rank {other})",
            do="give all ranks the same model, loss function and plan, and those of a pipeline the same microbatches",
        )
