"""Parameters as data ranks see them: their shape, and which rows each rank holds."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch

from graphcomp.errors import PlanError


@dataclass(frozen=True)
class Spec:
    """A parameter, or its gradient. device: the type of its device, such as "cuda"."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class Shards:
    """A parameter whose rows are split over data ranks, as `torch.chunk` and `DTensor`'s `Shard(0)` split.

    Each rank holds `chunk` rows, the last that holds any perhaps fewer, those behind it none. In step programs every
    rank has `chunk` rows, the missing ones filled up with zeros, for collectives need equal parts.

    Raises PlanError for a parameter without dimensions.
    """

    spec: Spec
    ranks: int

    def __post_init__(self) -> None:
        if not self.spec.shape:
            raise PlanError(
                f"parameter '{self.spec.name}' cannot be split over data ranks: it has no dimension",
                expected="one dimension or more",
                got="a number",
                do="keep it whole on every data rank",
            )
        if self.ranks < 1:
            raise PlanError(
                f"parameter '{self.spec.name}' cannot be split over {self.ranks} data ranks",
                expected="1 or more",
                got=self.ranks,
            )

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def rows(self) -> int:
        return self.spec.shape[0]

    @property
    def chunk(self) -> int:
        """Rows of each rank, padding included."""
        return -(-self.rows // self.ranks)

    @property
    def padded(self) -> tuple[int, ...]:
        """The shape of a shard in step programs, the same on every rank."""
        return (self.chunk, *self.spec.shape[1:])

    def rows_of(self, rank: int) -> int:
        """How many of the parameter's rows this rank holds: `chunk`, fewer, or none."""
        if not 0 <= rank < self.ranks:
            raise PlanError(f"there is no data rank {rank}", expected=f"0 to {self.ranks - 1}", got=rank)
        return max(0, min(self.chunk, self.rows - rank * self.chunk))
