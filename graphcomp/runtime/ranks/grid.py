"""Who stands where: the ranks of a mesh by data rank, tensor rank and stage, and who shares what with whom."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from graphcomp.plan import DATA_AXES, JOINED

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Groups = tuple[tuple[int, ...], ...]
"""Disjoint groups of ranks."""


@dataclass(frozen=True)
class Grid:
    """ranks: the rank at each [data rank][tensor rank][stage].

    data_axes: the mesh's axes `dp` and `cp` that are larger than 1, with their sizes, in the mesh's order. Data ranks
    count along the last one first.
    """

    ranks: tuple[tuple[tuple[int, ...], ...], ...]
    data_axes: tuple[tuple[str, int], ...] = ()

    @staticmethod
    def of(mesh: DeviceMesh) -> Grid:
        """Of the global ranks of a mesh."""
        names, grid = list(mesh.mesh_dim_names or ()), mesh.mesh
        data = [name for name in names if name in DATA_AXES]
        sizes = {name: grid.shape[names.index(name)] for name in names}
        for axis in ("tp", "pp"):
            if axis not in names:
                names, grid = [*names, axis], grid.unsqueeze(-1)
        grid = grid.permute(*(names.index(name) for name in (*data, "tp", "pp")))
        ranks = grid.reshape(-1, *grid.shape[-2:]).tolist()
        axes = tuple((name, sizes[name]) for name in data if sizes[name] > 1)
        return Grid(tuple(tuple(map(tuple, line)) for line in ranks), axes)

    @property
    def data_axis(self) -> str:
        """What the axis is called over which losses, counts and gradients are added up."""
        return JOINED if len(self.data_axes) > 1 else next((name for name, _ in self.data_axes), "dp")

    @property
    def shared_axes(self) -> tuple[str, ...]:
        """The axes over which ranks do something together while their pipelines run."""
        names = [name for name, _ in self.data_axes]
        joined = [JOINED] if len(names) > 1 else []
        return (*names, *joined, *(["tp"] if len(self.ranks[0]) > 1 else []))

    @property
    def everyone(self) -> Groups:
        return (tuple(rank for line in self.lines for rank in line),)

    @property
    def lines(self) -> Groups:
        """For each data rank, all who are given its microbatches."""
        return tuple(tuple(rank for pipeline in line for rank in pipeline) for line in self.ranks)

    @property
    def pipelines(self) -> Groups:
        """For each data rank and tensor rank, the ranks of the stages."""
        return tuple(pipeline for line in self.ranks for pipeline in line)

    def along(self, axis: str) -> Groups:
        """The groups of ranks that differ in one axis alone: "pp", "tp", "dp", "cp", or `data_axis`."""
        stacked = torch.tensor(self.ranks)
        if axis in ("tp", "pp"):
            return _rows(stacked.movedim(1 if axis == "tp" else 2, -1))
        if axis == self.data_axis:
            return _rows(stacked.movedim(0, -1))
        found = stacked.reshape(*(size for _, size in self.data_axes), *stacked.shape[1:])
        return _rows(found.movedim(self._place(axis), -1))

    def data_ranks_along(self, axis: str) -> Groups:
        """The groups of data ranks that differ in one data axis alone; none if the mesh does not have it."""
        if axis not in dict(self.data_axes):
            return ()
        found = torch.arange(len(self.ranks)).reshape([size for _, size in self.data_axes])
        return _rows(found.movedim(self._place(axis), -1))

    def position(self, rank: int) -> tuple[int, int, int]:
        """Data rank, tensor rank and stage of a rank."""
        return next(
            (data, tensor, pipeline.index(rank))
            for data, line in enumerate(self.ranks)
            for tensor, pipeline in enumerate(line)
            if rank in pipeline
        )

    def _place(self, axis: str) -> int:
        return [name for name, _ in self.data_axes].index(axis)


def _rows(found: torch.Tensor) -> Groups:
    rows: Sequence[Sequence[int]] = found.reshape(-1, found.shape[-1]).tolist()
    return tuple(map(tuple, rows))
