"""Memory in place: parameters stay the objects that they are, with all that hangs on them."""

from __future__ import annotations

import weakref
from collections.abc import Collection
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

from graphcomp.compat.blocks import block_of
from graphcomp.compat.tensor_parallel import forget_meshes
from graphcomp.errors import StateError
from graphcomp.runtime.state.initial import Recipe
from graphcomp.runtime.state.materialize import Holding, allocation, check_places, initialisation, on_meta
from tests.checkpoint.model import WIDTH, Decoder, meta_decoder
from tests.collectives.fake import fake_mesh
from tests.runtime.sharded import alone, full

CPU = Holding(torch.device("cpu"))


def initialise(model: nn.Module, holding: Holding = CPU, names: Collection[str] | None = None) -> None:
    initialisation(model, Recipe(), list(on_meta(model)) if names is None else names, holding)()


def test_objects_stay_with_what_was_set_on_them() -> None:
    model = meta_decoder()
    model.embed.weight.kind = "embedding"
    objects = dict(model.named_parameters(remove_duplicate=False))
    optimizer = torch.optim.AdamW(model.parameters())
    initialise(model)
    assert not on_meta(model)
    assert all(parameter is objects[name] for name, parameter in model.named_parameters(remove_duplicate=False))
    assert model.head.weight is model.embed.weight
    assert model.embed.weight.kind == "embedding"
    assert type(model.embed.weight) is nn.Parameter
    assert [p.requires_grad for p in (model.embed.weight, model.scale.shift)] == [True, False]
    model(torch.tensor([[1, 2]])).sum().backward()
    before = model.embed.weight.detach().clone()
    optimizer.step()
    assert not torch.equal(model.embed.weight, before)
    assert model.scale.ramp.tolist() == [float(i) for i in range(WIDTH)]
    assert "scale.ramp" not in model.state_dict()


def test_what_is_not_held_stays_on_meta() -> None:
    model = meta_decoder()
    initialise(model, names=["embed.weight", "scale.factor"])
    real = {name for name, one in (*model.named_parameters(), *model.named_buffers()) if not one.is_meta}
    assert real == {"embed.weight", "scale.factor"}


def test_a_buffer_with_two_names_stays_one() -> None:
    model = meta_decoder()
    model.scale.register_buffer("again", model.scale.factor)
    initialise(model)
    assert model.scale.again is model.scale.factor


def test_recurrent_layers_work() -> None:
    with torch.device("meta"):
        model = nn.LSTM(3, 4, 2)
    initialise(model)
    output, _ = model(torch.ones(2, 1, 3))
    output.sum().backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.gloo
def test_rows_become_dtensors_in_place() -> None:
    whole, model = meta_decoder(), meta_decoder()
    initialise(whole)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with alone() as mesh:
        initialise(model, Holding(torch.device("cpu"), mesh))
        assert all(isinstance(p, DTensor) for p in model.parameters())
        assert not isinstance(model.scale.factor, DTensor)
        for (name, found), expected in zip(model.named_parameters(), whole.parameters(), strict=True):
            assert torch.equal(full(found), expected), name
        assert optimizer.param_groups[0]["params"][0] is model.embed.weight is model.head.weight


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_rows_are_those_of_chunk(ranks: int) -> None:
    whole = nn.Parameter(torch.arange(14.0).view(7, 2))
    chunks = whole.detach().chunk(ranks)
    for rank in range(ranks):
        with fake_mesh(rank, dp=ranks) as mesh:
            holding = Holding(torch.device("cpu"), mesh["dp"])
            expected = chunks[rank] if rank < len(chunks) else whole.detach()[:0]
            part = holding.part(whole, whole.detach())
            assert torch.equal(part, expected)
            assert (part.data_ptr() != whole.data_ptr()) == (ranks > 1)
            assert holding.empty(whole).shape == expected.shape
            number = nn.Parameter(torch.tensor(1.0))
            assert holding.part(number, number) is number


class Head(nn.Module):
    """Uneven sizes, and layers of each kind that `parallelize_module` knows."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.plain = nn.Embedding(7, 4), nn.LayerNorm(4), nn.Linear(4, 4)
        self.up, self.down = nn.Linear(4, 9), nn.Linear(9, 4, bias=False)
        self.register_buffer("ramp", torch.empty(4))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.ramp.copy_(torch.arange(4.0))


STYLES = {"embed": RowwiseParallel(), "norm": SequenceParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}


def head() -> Head:
    with torch.device("meta"):
        return Head()


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_parts_of_tensor_ranks_make_up_the_whole(ranks: int) -> None:
    whole = head()
    initialise(whole)
    state = whole.state_dict()
    for rank in range(ranks):
        forget_meshes()
        with fake_mesh(rank, tp=ranks) as mesh:
            model = parallelize_module(head(), mesh["tp"], STYLES)
            distribute_module(model.plain, mesh["tp"])
            objects = dict(model.named_parameters())
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            initialise(model)
            assert not on_meta(model)
            assert list(map(id, optimizer.param_groups[0]["params"])) == list(map(id, objects.values()))
            for name, tensor in model.state_dict().items():
                found = tensor.to_local() if isinstance(tensor, DTensor) else tensor
                assert isinstance(tensor, DTensor) == (name != "ramp")
                assert torch.equal(found, state[name][block_of(tensor) or ...]), name
                if isinstance(tensor, DTensor):
                    assert found.is_contiguous() and tensor.shape == state[name].shape
    forget_meshes()


@pytest.mark.parametrize("empty", [False, True])
def test_rows_of_parts(empty: bool) -> None:
    """Over two data ranks and two tensor ranks: 2-D DTensors, and the plain ones over data ranks."""
    whole = head()
    initialise(whole)
    state = whole.state_dict()
    for rank in range(4):
        forget_meshes()
        with fake_mesh(rank, dp=2, tp=2) as mesh:
            model = parallelize_module(head(), mesh["tp"], STYLES)
            objects = list(map(id, model.parameters()))
            holding = Holding(torch.device("cpu"), mesh["dp"])
            if empty:
                allocation(model, list(on_meta(model)), holding)()
            else:
                initialise(model, holding)
            assert not on_meta(model) and objects == list(map(id, model.parameters()))
            for name, parameter in model.named_parameters():
                names = ("dp",) if name.startswith("plain") else ("dp", "tp")
                assert parameter.device_mesh.mesh_dim_names == names, name
                expected = state[name][block_of(parameter)]
                assert parameter.to_local().shape == expected.shape
                assert empty or torch.equal(parameter.to_local(), expected), name
    forget_meshes()


def test_a_buffer_of_tensor_ranks() -> None:
    forget_meshes()
    with fake_mesh(rank=1, tp=2) as mesh, torch.device("meta"):
        model = nn.BatchNorm1d(4)
        distribute_module(model, mesh["tp"], lambda _, module, tp: shard_buffer(module, tp))
        initialise(model)
        assert isinstance(model.running_var, DTensor) and model.running_var.to_local().tolist() == [1.0, 1.0]


def shard_buffer(module: nn.Module, mesh: Any) -> None:
    module.register_buffer("running_var", distribute_tensor(module.running_var, mesh, [Shard(0)]))


def test_memory_without_values() -> None:
    model = meta_decoder()
    allocation(model, ["embed.weight", "scale.factor"], CPU)()
    assert (model.head.weight.device.type, model.scale.factor.device.type) == ("cpu", "cpu")
    assert (model.head.weight.shape, model.norm.weight.is_meta) == ((13, WIDTH), True)


# ---- refused


class Special(nn.Parameter):
    pass


def test_what_cannot_be_exchanged_is_refused_by_name() -> None:
    with torch.device("meta"):
        special = nn.Linear(2, 2)
        special.weight = Special(torch.empty(2, 2))
    with pytest.raises(StateError, match=r"'weight' cannot be materialised in place\n  got: it is of class Special"):
        check_places(special, CPU)
    model = meta_decoder()
    held = weakref.ref(model.norm.weight)
    with pytest.raises(StateError, match=r"'norm.weight' cannot be materialised in place\n  got: it is in use"):
        check_places(model, CPU)
    del held
    model.norm.weight.register_hook(lambda gradient: gradient)
    with pytest.raises(StateError, match=r"'norm.weight' .*\n.*it has a gradient hook"):
        check_places(model, CPU)
    assert isinstance(model, Decoder)


def test_rows_of_a_transposed_parameter_are_refused() -> None:
    with torch.device("meta"):
        model = nn.Linear(2, 3)
        model.weight = nn.Parameter(torch.empty(2, 3).t())
    check_places(model, CPU)
    with fake_mesh(dp=2) as mesh, pytest.raises(StateError, match="it has strides"):
        check_places(model, Holding(torch.device("cpu"), mesh["dp"]))
