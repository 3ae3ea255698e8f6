"""Agreement: the ranks of a pipeline compare, on the host, what each is about to do; a failure of one ends all.

It runs over the gloo side group and never touches a device. On one rank there is nothing to compare.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable
from typing import Any

import torch
import torch.distributed as dist

from graphcomp.errors import AgreementError, RankFailure
from graphcomp.runtime.layout import Layout

_MASK = (1 << 62) - 1


class Agreement:
    """What the ranks of a layout tell each other before a step. Every rank calls the same methods in the same order."""

    def __init__(self, layout: Layout) -> None:
        self.rank, self.ranks, self.side = layout.rank, layout.stages, layout.side

    def compare_step(self, facts: Hashable, text: str = "", failure: Exception | None = None) -> None:
        """One small exchange at the beginning of each step.

        facts: numbers only, so that equal ones hash alike in every process. text: the same in words. failure: why this
        rank cannot take part. Raises RankFailure where another rank has failed, and AgreementError, on all ranks, if
        facts differ. Returns on the rank that failed, which raises its own error.
        """
        if self.side is None:
            return
        number = hash(facts) & _MASK
        found = torch.tensor([failure is not None, number, -number])
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self.side)
        failed, most, least = found.tolist()
        if failed or most != -least:
            self.share(text, failure, "take part in the step")

    def of_the_first(self, values: torch.Tensor) -> torch.Tensor:
        """The host tensor that the pipeline's first rank has, on all of them."""
        if self.side is not None:
            dist.broadcast(values, group=self.side, group_src=0)
        return values

    def share(self, text: str, failure: Exception | None, what: str, more: object = None) -> list[Any]:
        """Compare texts line by line; returns what each rank gave as `more`. Raises as `compare_step` does."""
        if self.side is None:
            return [more]
        digest = hashlib.sha256(text.encode()).hexdigest()
        everyone: list[Any] = [None] * self.ranks
        mine = (digest, None if failure is None else f"{type(failure).__name__}: {failure}", more)
        dist.all_gather_object(everyone, mine, group=self.side)
        error = next(((rank, said) for rank, (_, said, _) in enumerate(everyone) if said is not None), None)
        if failure is not None:
            return []
        if error is not None:
            raise RankFailure(f"rank {error[0]} could not {what}", where=f"rank {error[0]}", got=error[1])
        if len({theirs for theirs, _, _ in everyone}) > 1:
            self._differ(text, next(rank for rank, one in enumerate(everyone) if one[0] != digest))
        return [one[2] for one in everyone]

    def _differ(self, text: str, other: int) -> None:
        texts: list[Any] = [None] * self.ranks
        dist.all_gather_object(texts, text, group=self.side)
        mine, theirs = text.splitlines(), texts[other].splitlines()
        place = next(
            (i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), min(len(mine), len(theirs))
        )
        own, their = (lines[place].strip() if place < len(lines) else "nothing more" for lines in (mine, theirs))
        raise AgreementError(
            "the ranks would not do the same",
            where=f"ranks {self.rank} and {other}",
            expected=f"{own} (rank {self.rank})",
            got=f"{their} (rank {other})",
            do="give every rank the same model, loss function, plan and microbatches",
        )
