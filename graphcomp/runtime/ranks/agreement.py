"""Agreement: before a step the ranks compare, on the host, what each is about to do; a failure of one ends it on all.

It never touches a device: it runs over the gloo side group; where the job is one pipeline on one machine, what every
step compares goes over its channels. Where there is one rank only, there is nothing to compare.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from graphcomp.errors import RankFailure, error_text
from graphcomp.runtime.ranks.difference import difference
from graphcomp.runtime.ranks.exchanges import Exchanges
from graphcomp.runtime.ranks.grid import Grid, Groups
from graphcomp.runtime.ranks.layout import Layout
from graphcomp.schedule import named_stages

_MASK = (1 << 62) - 1


@dataclass(frozen=True)
class Intent:
    """What a rank is about to do in a step, in numbers that are alike in every process.

    common: what all ranks of the job must have in common. own: what those of one data rank must, besides. describe:
    gives both in words, what is common on the first line; asked for where they differ. contribution: stands for what
    this data rank adds to the sums over all of them (see `dataparallel.contribution`). microbatches: how many it has.
    is_new: it cannot run this before all ranks prepare. exchanges: by axis, what the ranks along it must have in
    common; known only to one that is not new.
    """

    common: Hashable = ()
    own: Hashable = ()
    describe: Callable[[], str] = str
    contribution: int = 0
    microbatches: int = 0
    is_new: bool = False
    exchanges: Mapping[str, Exchanges] = field(default_factory=dict)


@dataclass(frozen=True)
class DataRank:
    """What one data rank said: `contribution` and `microbatches` as in its `Intent`."""

    contribution: int
    microbatches: int


@dataclass(frozen=True)
class Agreed:
    """What all ranks know then. is_new: some rank is. apart: an axis along which exchanges are known to differ."""

    ranks: tuple[DataRank, ...]
    is_new: bool
    apart: str | None = None


ErrorType = TypeVar("ErrorType", bound=BaseException)


class Agreement:
    """What the ranks tell each other before a step. Every rank calls the same methods in the same order."""

    def __init__(self, layout: Layout) -> None:
        self.side, self.place = layout.side, layout.place
        self.grid = layout.grid or Grid(((layout.ranks,),))
        self._stages_on = layout.stages_on
        self.lines, self.everyone = self.grid.lines, self.grid.everyone
        self.along = {axis: self.grid.along(axis) for axis in self.grid.shared_axes}
        self._chain = layout.chain if len(self.everyone[0]) == len(layout.ranks) else None
        self._told: BaseException | None = None

    def known(self, error: BaseException) -> bool:
        """Whether all ranks know of this error, which was raised here, and raise as well. To be asked once."""
        found, self._told = self._told, None  # kept no longer: an error holds on to all that was in its frames
        return error is found

    def told(self, error: ErrorType) -> ErrorType:
        """The same, noted as one that all ranks know of."""
        self._told = error
        return error

    def compare(self, intent: Intent, failure: Exception | None = None) -> Agreed:
        """One small exchange at the beginning of each step.

        failure: why this rank cannot take part. Raises RankFailure where another rank has failed, and AgreementError,
        on all ranks, if they would not do the same. Returns on the rank that failed, which raises its own error. Where
        that cannot be told, because another rank is gone, the error gets a note.
        """
        if self.side is None:
            return Agreed((DataRank(intent.contribution, intent.microbatches),), intent.is_new)
        own = [
            failure is not None,
            hash(intent.common) & _MASK,
            hash(intent.own) & _MASK,
            intent.contribution,
            intent.microbatches,
            intent.is_new,
            *(intent.exchanges[axis].number if axis in intent.exchanges else 0 for axis in self.along),
        ]
        try:
            rows = self._gathered(torch.tensor(own)).tolist()
        except RuntimeError as lost:
            if failure is None:
                raise
            failure.add_note(f"the other ranks could not be told: {lost}")
            return Agreed((), True)

        def alike(groups: Groups, column: int) -> bool:
            return all(len({rows[member][column] for member in group}) == 1 for group in groups)

        if any(row[0] for row in rows) or not alike(self.everyone, 1):
            self.share(intent.describe().partition("\n")[0], failure, "take part in the step", self.everyone)
        elif not alike(self.lines, 2):
            self.share(intent.describe(), None, "take part in the step")
        is_new = any(row[5] for row in rows)
        firsts = [rows[line[0]] for line in self.lines]
        ranks = tuple(DataRank(row[3], row[4]) for row in firsts)
        apart = (axis for column, axis in enumerate(self.along, start=6) if not alike(self.along[axis], column))
        return Agreed(ranks, is_new, None if is_new else next(apart, None))

    def _gathered(self, row: torch.Tensor) -> torch.Tensor:
        """The rows of all ranks of the job."""
        if self._chain is not None:
            return self._chain.gather(row)
        everyone = row.new_empty(dist.get_world_size(self.side) * len(row))
        dist.all_gather_single(everyone, row, group=self.side)
        return everyone.view(-1, len(row))

    def of_the_first(self, values: torch.Tensor) -> torch.Tensor:
        """The host tensor that the job's first rank has, on all of them."""
        if self.side is not None:
            dist.broadcast(values, group=self.side, group_src=0)
        return values

    def meet(self) -> None:
        """Come back when all ranks have come here."""
        if self.side is not None:
            dist.all_reduce(torch.zeros(1), group=self.side)

    def share(
        self,
        text: str,
        failure: Exception | None,
        what: str,
        groups: Sequence[Sequence[int]] | None = None,
        more: object = None,
    ) -> list[list[Any]]:
        """Compare texts, line by line, within each of these groups (None: the ranks of each data rank); raises as
        `compare` does.

        Returns what each rank gave as `more`: a list for every data rank, in order; the rank that failed gets an empty
        list.
        """
        if self.side is None:
            return [[more]]
        digest = hashlib.sha256(text.encode()).hexdigest()
        everyone: list[Any] = [None] * dist.get_world_size(self.side)
        mine = (digest, None if failure is None else error_text(failure, notes=True), more)
        try:
            dist.all_gather_object(everyone, mine, group=self.side)
        except RuntimeError as lost:
            if failure is None:
                raise
            failure.add_note(f"the other ranks could not be told: {lost}")
            return []
        error = next(((rank, said) for rank, (_, said, _) in enumerate(everyone) if said is not None), None)
        if failure is not None:
            self.told(failure)
            return []
        if error is not None:
            place = f"rank {error[0]}, {named_stages(self._stages_on(self.grid.position(error[0])[2]))}"
            raise self.told(RankFailure(f"rank {error[0]} could not {what}", where=place, got=error[1]))
        groups = self.lines if groups is None else groups
        different = [group for group in groups if len({everyone[member][0] for member in group}) > 1]
        if different:
            texts: list[Any] = [None] * len(everyone)
            dist.all_gather_object(texts, text, group=self.side)
            own = next((group for group in different if self.place in group), different[0])
            first = self.place if self.place in own else own[0]
            other = next(member for member in own if texts[member] != texts[first])
            raise self.told(difference(texts, first, other))
        return [[everyone[member][2] for member in line] for line in self.lines]

    def alike(self, texts: Mapping[str, str], causes: Mapping[str, Callable[[], Sequence[str]]] | None = None) -> None:
        """Raise AgreementError, on all ranks, where two of them have different texts under one name.

        causes: lines for each that tell why, if they differ themselves; they may differ where the texts do not.
        """
        if self.side is None:
            return
        digests = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in texts.items()}
        everyone: list[Any] = [None] * dist.get_world_size(self.side)
        dist.all_gather_object(everyone, digests, group=self.side)
        seen: dict[str, int] = {}
        for rank, found in enumerate(everyone):
            for name, digest in found.items():
                first = seen.setdefault(name, rank)
                if everyone[first][name] != digest:
                    cause = causes[name]() if causes and name in causes else ()
                    self.share("\n".join([*cause, texts.get(name, "")]), None, "", [(first, rank)])
