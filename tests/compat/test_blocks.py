"""Blocks are what torch's own functions say, without an operation on tensors."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import (
    _compute_local_shape_and_global_offset,
    compute_local_shape_and_global_offset,
)
from torch.distributed.tensor.placement_types import _StridedShard

from graphcomp.compat.blocks import (
    Placed,
    along,
    block_of,
    is_whole,
    joined,
    placed_as,
    rows_over,
    splits_alike,
)
from tests.collectives.fake import fake_mesh

SHAPES = [(8, 6), (7, 5), (1, 3), (0, 4)]


@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Shard(1)])
def test_of_one_axis(placement: Replicate | Shard) -> None:
    for shape, ranks in itertools.product(SHAPES, (1, 2, 3)):
        for rank in range(ranks):
            with fake_mesh(rank, tp=ranks) as mesh:
                block = Placed(mesh["tp"], (placement,)).block(shape)
                sizes, offsets = compute_local_shape_and_global_offset(shape, mesh["tp"], [placement])
                assert [one.stop - one.start for one in block] == list(sizes)
                assert [one.start for one in block] == list(offsets)
                assert is_whole(block, shape) == (list(sizes) == list(shape))


def test_torch_itself_makes_tensors_on_the_default_device() -> None:
    """Once this passes, torch's own function will do."""
    with fake_mesh(rank=1, tp=2) as mesh, torch.device("meta"):
        with pytest.raises(RuntimeError, match="meta"):
            compute_local_shape_and_global_offset((4,), mesh["tp"], [Shard(0)])
        assert Placed(mesh["tp"], (Shard(0),)).block((4,)) == (slice(2, 4),)


def test_of_a_tensor() -> None:
    assert placed_as(torch.ones(2)) is block_of(torch.ones(2)) is None
    with fake_mesh(rank=1, tp=2) as mesh:
        part = DTensor.from_local(torch.ones(3, 2), mesh["tp"], [Shard(1)], run_check=False)
        assert block_of(part) == (slice(0, 3), slice(2, 4))
        assert placed_as(part) == placed_as(part.detach()) == Placed(mesh["tp"], (Shard(1),))


def positions(ranks: int, parts: int) -> itertools.product:
    return itertools.product(range(ranks), range(parts))


@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Shard(1)])
@pytest.mark.parametrize(("ranks", "parts"), [(2, 2), (3, 2), (2, 3)])
def test_rows_of_parts_are_those_of_fully_shard(placement: Replicate | Shard, ranks: int, parts: int) -> None:
    """And of torch's own reading of such a layout, wherever it can say so."""
    for rank, part in positions(ranks, parts):
        with fake_mesh(rank * parts + part, dp=ranks, tp=parts) as mesh:
            before = Placed(mesh["tp"], (placement,))
            placed = rows_over(mesh["dp"], before)
            assert placed.mesh.mesh_dim_names == ("dp", "tp") and placed.mesh == mesh
            for shape in [(12, 6), (5, 4), (7, 3), (9, 2), (1, 3), (10, 12)]:
                whole = torch.arange(shape[0] * shape[1]).view(shape)
                own = whole[before.block(shape)].chunk(ranks)
                expected = own[rank] if rank < len(own) else own[0][:0]
                found = whole[placed.block(shape)]
                assert torch.equal(found, expected), shape
                if placement != Shard(0) or splits_alike(shape[0], parts, ranks):
                    sizes, offsets = compute_local_shape_and_global_offset(shape, placed.mesh, placed.placements)
                    assert list(sizes) == list(found.shape)
                    assert not found.numel() or int(whole[tuple(offsets)]) == int(found.reshape(-1)[0])


@pytest.mark.parametrize(("ranks", "parts"), [(2, 2), (3, 2), (4, 3)])
def test_which_rows_torch_would_take_for_others(ranks: int, parts: int) -> None:
    for rows in range(1, 26):
        alike = True
        for rank, part in positions(ranks, parts):
            placements = [_StridedShard(0, split_factor=parts), Shard(0)]
            sizes, _ = _compute_local_shape_and_global_offset((rows,), (ranks, parts), [rank, part], placements)
            own = torch.arange(rows).chunk(parts)
            rest = own[part].chunk(ranks) if part < len(own) else ()
            alike = alike and sizes == ((rest[rank].numel() if rank < len(rest) else 0),)
        assert splits_alike(rows, parts, ranks) == alike, rows
    assert splits_alike(parts * 7, parts, ranks)


@pytest.mark.parametrize("names", ["dp cp tp", "cp tp dp", "tp dp cp"])
def test_rows_over_joined_axes(names: str) -> None:
    """Data ranks count along the last one first."""
    axes = dict.fromkeys(names.split(), 2)
    data = tuple(name for name in axes if name != "tp")
    for rank in range(8):
        with fake_mesh(rank, **axes) as mesh:
            flat = joined(mesh, data, "dp_cp")
            assert flat is joined(mesh, data, "dp_cp") or flat == joined(mesh, data, "dp_cp")
            number = 2 * mesh.get_local_rank(data[0]) + mesh.get_local_rank(data[1])
            assert (flat.mesh_dim_names, flat.size(), flat.get_local_rank()) == (("dp_cp",), 4, number)
            placed = rows_over(flat, Placed(mesh["tp"], (Shard(0),)))
            begin = 8 * mesh.get_local_rank("tp") + 2 * number
            assert placed.block((16,)) == (slice(begin, begin + 2),)
            sizes, offsets = compute_local_shape_and_global_offset((16,), placed.mesh, placed.placements)
            assert (sizes, offsets) == ((2,), (begin,))


@pytest.mark.parametrize("axes", [{"dp": 2, "tp": 2}, {"tp": 2, "dp": 2}, {"pp": 2, "dp": 2, "tp": 2}])
def test_an_axis_of_a_tensor(axes: dict[str, int]) -> None:
    """In whichever order the mesh has them."""
    with fake_mesh(rank=3, **axes) as mesh:
        before = Placed(mesh["tp"], (Shard(1),))
        placed = rows_over(mesh["dp"], before)
        split = DTensor.from_local(torch.ones(2, 3), placed.mesh, placed.placements, run_check=False)
        assert placed.mesh.mesh_dim_names == ("dp", "tp")
        assert along(split, "tp") == before and along(split, "dp") == rows_over(mesh["dp"])
        assert along(split, "cp") is along(torch.ones(2), "tp") is None
        assert block_of(split) == (slice(2, 4), slice(3, 6))
