"""Parts of different sizes while a program is traced: torch's own arithmetic, one program for many sizes."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, placement_types
from torch.distributed.tensor._ops import utils
from torch.fx.experimental.proxy_tensor import make_fx

from graphcomp.compat.symbols import conditions, fake_batch_leaf, new_fake_mode
from graphcomp.compat.tensor_parallel import forget_meshes
from graphcomp.compat.uneven import part, parts_of_any_size
from graphcomp.errors import CaptureError
from tests.collectives.fake import fake_mesh

REPLACED = (
    (placement_types, "pad_tensor"),
    (utils, "is_tensor_shardable"),
    (Shard, "_custom_chunk"),
    (Shard, "local_shard_size_and_offset"),
    (DTensor, "to_local"),
    (DTensor, "from_local"),
)


def test_torch_is_as_before() -> None:
    def state() -> list[dict[str, Any]]:
        return [dict(vars(owner)) for owner in (placement_types, utils, Shard, DTensor)]

    before, ours = state(), [vars(owner)[name] for owner, name in REPLACED]
    with parts_of_any_size():
        assert all(vars(owner)[name] is not own for (owner, name), own in zip(REPLACED, ours, strict=True))
    assert state() == before


@pytest.mark.parametrize("ranks", range(1, 6))
def test_parts_are_those_of_chunk(ranks: int) -> None:
    for size in range(1, 23):
        chunks = [list(each) for each in torch.arange(size).chunk(ranks)]
        for rank in range(ranks):
            length, begin = part(size, ranks, rank)
            assert list(range(size))[begin : begin + length] == (chunks[rank] if rank < len(chunks) else [])
            assert (length, begin) == Shard.local_shard_size_and_offset(size, ranks, rank)


def lengths_served(rank: int, ranks: int, shim: bool, before: Any, after: Any) -> list[int]:
    """The lengths for which a trace of one redistribution, at length 8, says that it holds."""
    forget_meshes()
    mode = new_fake_mode()
    with fake_mesh(rank, tp=ranks) as mesh:
        fake = fake_batch_leaf(mode, torch.ones(6, 8, 4), "x")

        def function(x: Tensor) -> Tensor:
            whole = DTensor.from_local(x, mesh["tp"], [before], run_check=False)
            return whole.redistribute(placements=[after]).to_local().sin()

        with mode, parts_of_any_size() if shim else contextlib.nullcontext():
            make_fx(function, tracing_mode="real", _allow_non_fake_inputs=True)(fake)
    symbol = fake.shape[1].node.expr
    found = conditions(mode, {str(symbol)})
    return [length for length in range(2, 40) if all(bool(each.subs(symbol, length)) for each in found)]


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_one_program_for_all_lengths_that_do_not_divide(rank: int) -> None:
    """But for those of which a rank has one row, or none. Unshimmed, what fills parts up asks for the length."""
    for before in (Partial(), Replicate()):
        found = lengths_served(rank, 3, True, before, Shard(1))
        assert {length for length in range(8, 40) if length % 3} <= set(found)
        assert not any(length % 3 == 0 for length in found)
    assert len(lengths_served(rank, 3, False, Partial(), Shard(1))) == 1
    forget_meshes()


def test_a_part_that_is_handed_on_is_one_of_the_same_whole() -> None:
    for rank, length in enumerate((4, 3)):
        with fake_mesh(rank, tp=2) as mesh:
            form = {"shape": (2, 7), "stride": (7, 1)}

            def handed_on(local: Tensor) -> Any:
                return DTensor.from_local(local, mesh["tp"], [Shard(-1)], run_check=False).shape

            local = torch.ones(2, length)
            whole = DTensor.from_local(local, mesh["tp"], [Shard(1)], run_check=False, **form)
            assert handed_on(whole.to_local().sin()) == (2, 2 * length)  # the shim is needed
            with parts_of_any_size():
                assert handed_on(local) == (2, 2 * length)  # which nobody has seen as a part yet
                assert handed_on(whole.to_local().sin()) == (2, 7)
                assert handed_on(whole.to_local()[:, :2]) == (2, 4)
                with pytest.raises(CaptureError, match="does not tell how large the whole is") as caught:
                    handed_on(torch.ones(2, 7 - length))
            assert caught.value.expected == "a part of 7 (4, 3)"
        forget_meshes()


def test_a_size_that_several_wholes_have_a_part_of() -> None:
    """Told apart by the dimension, else refused."""
    with fake_mesh(0, tp=2) as mesh, parts_of_any_size():
        for shape, local, dim in (((7, 2), (4, 2), 0), ((2, 5), (2, 3), 1)):
            form = {"shape": shape, "stride": (shape[1], 1)}
            DTensor.from_local(torch.ones(local), mesh["tp"], [Shard(dim)], run_check=False, **form).to_local()
        assert DTensor.from_local(torch.ones(2, 3), mesh["tp"], [Shard(1)], run_check=False).shape == (2, 5)
        form = {"shape": (7,), "stride": (1,)}
        DTensor.from_local(torch.ones(4), mesh["tp"], [Shard(0)], run_check=False, **form).to_local()
        form = {"shape": (2, 7), "stride": (7, 1)}
        DTensor.from_local(torch.ones(2, 4), mesh["tp"], [Shard(1)], run_check=False, **form).to_local()
        with pytest.raises(CaptureError) as caught:
            DTensor.from_local(torch.ones(2, 3), mesh["tp"], [Shard(1)], run_check=False)
        assert caught.value.expected == "a part of 7 (4, 3), or of 5 (3, 2)"
    forget_meshes()


def part_of(mesh: Any, size: int) -> Tensor:
    """A rank's part of columns, as a layer hands it on."""
    local = torch.ones(2, part(size, 2, mesh["tp"].get_local_rank())[0])
    form = {"shape": (2, size), "stride": (size, 1)}
    return DTensor.from_local(local, mesh["tp"], [Shard(1)], run_check=False, **form).to_local()


@pytest.mark.parametrize("size", [7, 9])
def test_ranks_refuse_alike_where_one_of_them_cannot_tell(size: int) -> None:
    """One rank's part is as large as that of a size that divides; the other one's is like no other."""
    for rank in range(2):
        with fake_mesh(rank, tp=2) as mesh, parts_of_any_size():

            def handed_on(local: Tensor, mesh: Any = mesh) -> Any:
                return DTensor.from_local(local, mesh["tp"], [Shard(1)], run_check=False).shape

            assert handed_on(part_of(mesh, 8)) == (2, 8)
            assert handed_on(part_of(mesh, 13)) == (2, 13)
            for local in (part_of(mesh, size), part_of(mesh, 8)):
                with pytest.raises(CaptureError, match="does not tell how large the whole is") as caught:
                    handed_on(local)
                parts = ", ".join(str(part(size, 2, each)[0]) for each in range(2))
                assert caught.value.expected == f"a part of 8 (4, 4), or of {size} ({parts})"
            assert handed_on(part_of(mesh, 13)) == (2, 13)
        forget_meshes()


def test_a_length_of_any_size_is_no_part_of_a_number() -> None:
    """Lengths that divide, beside columns that do not."""
    mode = new_fake_mode()
    with fake_mesh(0, tp=2) as mesh:
        fake = fake_batch_leaf(mode, torch.ones(6, 8), "x")
        with parts_of_any_size():
            part_of(mesh, 15)
            whole = DTensor.from_local(fake, mesh["tp"], [Shard(1)], run_check=False)
    forget_meshes()
    assert whole.shape[1].node.expr == 2 * fake.shape[1].node.expr


def test_what_torch_raises_tells_which_parts_there_are() -> None:
    with fake_mesh(1, tp=2) as mesh:
        for known, kind, got in ((False, RuntimeError, None), (True, CaptureError, "is invalid for input of size 8")):
            with pytest.raises(kind) as caught, parts_of_any_size(), new_fake_mode() as mode:
                local = part_of(mesh, 9) if known else mode.from_tensor(torch.ones(2, 4))
                local.view(2, -1, 3)
            if got is not None:
                assert isinstance(caught.value, CaptureError) and got in str(caught.value.got)
                assert caught.value.expected == "code that goes with any tensor rank's part of 9 (5, 4)"
        with pytest.raises(RuntimeError, match="by the model"), parts_of_any_size():
            part_of(mesh, 9)
            raise RuntimeError("by the model")
    forget_meshes()


def test_what_is_smaller_than_the_number_of_ranks_stays_in_parts() -> None:
    """Or a layer that is told that its output is in parts hands on the whole."""
    with fake_mesh(0, tp=2) as mesh:
        for shim, placement in ((False, Replicate()), (True, Shard(1))):
            forget_meshes()
            with parts_of_any_size() if shim else contextlib.nullcontext():
                form = {"shape": (3, 1, 4), "stride": (4, 4, 1)}
                whole = DTensor.from_local(torch.ones(3, 1, 4), mesh["tp"], [Shard(1)], run_check=False, **form)
                weight = DTensor.from_local(torch.ones(4), mesh["tp"], [Replicate()], run_check=False)
                assert F.layer_norm(whole, (4,), weight, weight).placements == (placement,)
    forget_meshes()
