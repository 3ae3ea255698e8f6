"""How a `DTensor` is laid over ranks, and which block of the whole a rank holds.

What torch has for this, under a private name, makes lists of row numbers, on the default device. Private as well are
meshes of two others' axes or of several axes as one, and rows that are split behind a later axis of the mesh.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

Block = tuple[slice, ...]
"""Of a tensor: a range of each of its dimensions."""


@dataclass(frozen=True)
class Placed:
    """A placement for each axis of a mesh."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]

    def block(self, shape: Sequence[int]) -> Block:
        """What this rank holds of a tensor of this shape; may be empty. Parts are those of `torch.chunk`."""
        block = [slice(0, size) for size in shape]
        parted = [(i, one) for i, one in enumerate(self.placements) if isinstance(one, Shard | _StridedShard)]
        for axis, placement in sorted(parted, key=lambda each: isinstance(each[1], _StridedShard)):  # these come last
            whole = block[placement.dim]
            chunk = -(-(whole.stop - whole.start) // self.mesh.size(axis))
            begin = min(whole.start + chunk * self.mesh.get_local_rank(axis), whole.stop)
            block[placement.dim] = slice(begin, min(begin + chunk, whole.stop))
        return tuple(block)


def placed_as(tensor: torch.Tensor) -> Placed | None:
    """How a tensor is laid over ranks; None for a plain one."""
    return Placed(tensor.device_mesh, tuple(tensor.placements)) if isinstance(tensor, DTensor) else None


def block_of(tensor: torch.Tensor) -> Block | None:
    """Which block of the whole this rank holds; None for a plain tensor."""
    found = placed_as(tensor)
    return None if found is None else found.block(tensor.shape)


def along(tensor: torch.Tensor, axis: str) -> Placed | None:
    """How a tensor is laid over one axis of its mesh; None for a plain one, and for a mesh without that axis."""
    found = placed_as(tensor)
    names = () if found is None else found.mesh.mesh_dim_names or ()
    if found is None or axis not in names:
        return None
    return Placed(found.mesh[axis], (found.placements[names.index(axis)],))


def rows_over(mesh: DeviceMesh, before: Placed | None = None) -> Placed:
    """Rows split over a mesh of one axis: of a whole tensor, or of the part that a layout over one other axis leaves.

    As `fully_shard` has it: the new axis comes first, and where rows were split before, each part's are.
    """
    placements = split_rows(before)
    return Placed(mesh if before is None else DeviceMesh._concatenate([mesh, before.mesh]), placements)


def split_rows(before: Placed | None = None) -> tuple[Placement, ...]:
    """The placements that `rows_over` makes."""
    if before is None:
        return (Shard(0),)
    parts = before.mesh.size() if before.placements[0].is_shard(0) else 1
    return (_StridedShard(0, split_factor=parts) if parts > 1 else Shard(0), *before.placements)


def joined(mesh: DeviceMesh, axes: tuple[str, ...], name: str) -> DeviceMesh:
    """The ranks along some axes as a mesh of one; it belongs to the mesh, so it is the same each time. All ranks of the
    mesh must call it."""
    return mesh[axes]._flatten(name)


def is_whole(block: Block, shape: Sequence[int]) -> bool:
    return all(part == slice(0, size) for part, size in zip(block, shape, strict=True))


def splits_alike(rows: int, parts: int, ranks: int) -> bool:
    """Whether a `DTensor` can say that rows are split into parts, and each part over ranks.

    It splits in the order of its mesh's axes: the ranks' rows of all parts, then these into parts again.
    """
    own = [[_share(_share(rows, parts, part), ranks, rank) for part in range(parts)] for rank in range(ranks)]
    return all(_share(sum(each), parts, part) == each[part] for each in own for part in range(parts))


def _share(rows: int, parts: int, part: int) -> int:
    """How many rows of `torch.chunk` are in one part."""
    chunk = -(-rows // parts)
    return max(0, min(chunk, rows - part * chunk))
