"""Optimizers over sharded parameters: made before, with and without state, or after, they do what one process does."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR

from graphcomp import shard_optimizer_state
from graphcomp.compat.blocks import Placed, placed_as, rows_over
from graphcomp.compat.sharded import shard_in_place
from graphcomp.compat.tensor_parallel import forget_meshes
from graphcomp.dataparallel.spec import Shards
from graphcomp.errors import StateError
from graphcomp.runtime.state.live import LiveState
from graphcomp.runtime.state.optimizer_state import held_state
from graphcomp.runtime.state.shards import shard_parameters
from graphcomp.testing import run_ranks
from tests.collectives.fake import fake_mesh
from tests.runtime.sharded import alone, data_mesh, full, gradients, uneven

pytestmark = pytest.mark.gloo

OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "adamw": partial(AdamW, lr=0.1, weight_decay=0.1, foreach=False),
    "adamw foreach": partial(AdamW, lr=0.1, weight_decay=0.1, foreach=True),
    "adamw fused": partial(AdamW, lr=0.1, weight_decay=0.1, fused=True),
    "adam amsgrad": partial(Adam, lr=0.1, amsgrad=True),
    "sgd": partial(SGD, lr=0.1, momentum=0.9, weight_decay=0.1),
    "sgd foreach": partial(SGD, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "adagrad": partial(Adagrad, lr=0.1),  # has state from the beginning
}
MADE = ("before", "before, with state", "after")


def in_double() -> nn.Module:
    return uneven().double()


def groups(model: nn.Module) -> list[dict[str, Any]]:
    biases = [p for name, p in model.named_parameters() if name.endswith("bias")]
    others = [p for name, p in model.named_parameters() if not name.endswith("bias")]
    return [{"params": others}, {"params": biases, "weight_decay": 0.0}]


def update(model: nn.Module, optimizer: Optimizer, step: int, shards: dict[str, Shards], rank: int = 0) -> None:
    LiveState(model).commit(gradients(model, step, shards, rank), {})
    optimizer.step()
    optimizer.zero_grad()


def train(make: Callable[..., Optimizer], made: str, mesh: DeviceMesh | None = None) -> dict[str, Tensor]:
    """Three updates, or four where the optimizer has state before the parameters are sharded, over a mesh if given."""
    model, shards, rank = in_double(), {}, 0
    if mesh is not None:
        rank = mesh.get_local_rank()
    if made != "after":
        optimizer = make(groups(model))
        schedule = StepLR(optimizer, 1, gamma=0.5)
    if made == "before, with state":
        update(model, optimizer, 0, {})
        schedule.step()
    if mesh is not None:
        shards = shard_parameters(model, mesh)
    if made == "after":
        optimizer = make(groups(model))
        schedule = StepLR(optimizer, 1, gamma=0.5)
    for step in range(1, 4):
        update(model, optimizer, step, shards, rank)
        schedule.step()
    for parameter, held in optimizer.state.items():
        assert all(isinstance(v, DTensor) == isinstance(parameter, DTensor) for v in held.values() if v.dim())
    return {name: full(p) for name, p in model.named_parameters()}


def trains(rank: int) -> dict[tuple[str, str], dict[str, Tensor]]:
    mesh = data_mesh()
    return {(name, made): train(make, made, mesh) for name, make in OPTIMIZERS.items() for made in MADE}


@pytest.mark.parametrize("ranks", [2, 3])
def test_training_is_that_of_one_process(ranks: int) -> None:
    found = run_ranks(trains, ranks)
    for (name, made), values in found[0].items():
        expected = train(OPTIMIZERS[name], made)
        for parameter, value in values.items():
            torch.testing.assert_close(value, expected[parameter], rtol=1e-12, atol=1e-14, msg=f"{name} made {made}")
            assert all(torch.equal(other[name, made][parameter], value) for other in found)


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    with alone() as found:
        yield found


def test_state_of_a_plain_checkpoint_is_split_on_demand(mesh: DeviceMesh) -> None:
    expected, model = in_double(), in_double()
    optimizer = AdamW(expected.parameters(), lr=0.1)
    update(expected, optimizer, 0, {})
    file = io.BytesIO()
    torch.save((expected.state_dict(), optimizer.state_dict()), file)
    file.seek(0)
    weights, held = torch.load(file)
    shards = shard_parameters(model, mesh)
    loaded = AdamW(model.parameters(), lr=0.3)
    model.load_state_dict(weights)
    loaded.load_state_dict(held)
    for _ in range(2):  # what is split stays as it is
        shard_optimizer_state(loaded)
    update(expected, optimizer, 1, {})
    update(model, loaded, 1, shards)
    assert all(torch.equal(full(p), q) for p, q in zip(model.parameters(), expected.parameters(), strict=True))


def test_state_of_another_shape_is_refused(mesh: DeviceMesh) -> None:
    model = uneven()
    shard_parameters(model, mesh)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer.state[model.up.weight] = {"whole": torch.ones(5, 3), "factors": [torch.ones(5), torch.ones(3)]}
    with pytest.raises(StateError, match="SGD holds 'factors' for parameter"):
        shard_optimizer_state(optimizer)
    assert type(optimizer.state[model.up.weight]["whole"]) is Tensor


def test_what_dtensors_have_no_rule_for_raises(mesh: DeviceMesh) -> None:
    model = uneven()
    optimizer = SGD(model.parameters(), lr=0.1, fused=True)
    shards = shard_parameters(model, mesh)
    with pytest.raises(NotImplementedError, match="_fused_sgd_"):
        update(model, optimizer, 0, shards)


# Checkpoints

PARTS = ("model", "optimizer")


def checkpoints(rank: int, folder: str) -> dict[str, bool]:
    mesh = data_mesh()
    model = in_double()
    optimizer = AdamW(groups(model), lr=0.1)
    shards = shard_parameters(model, mesh)
    update(model, optimizer, 0, shards, rank)
    options = StateDictOptions(full_state_dict=True)
    whole = copy.deepcopy(get_state_dict(model, optimizer, options=options))
    dcp.save(dict(zip(PARTS, get_state_dict(model, optimizer), strict=True)), checkpoint_id=folder)
    update(model, optimizer, 1, shards, rank)
    expected = {name: full(p) for name, p in model.named_parameters()}
    found = {}
    for way in ("distributed", "whole"):
        other = in_double()
        later = AdamW(groups(other), lr=0.7)
        shard_parameters(other, mesh)
        identities = [*map(id, other.parameters())]
        if way == "distributed":
            state = dict(zip(PARTS, get_state_dict(other, later), strict=True))
            dcp.load(state, checkpoint_id=folder)
            parts, how = [state[part] for part in PARTS], None
        else:
            parts, how = copy.deepcopy(whole), options
        set_state_dict(other, later, model_state_dict=parts[0], optim_state_dict=parts[1], options=how)
        update(other, later, 1, shards, rank)
        found[way] = all(torch.equal(full(p), expected[name]) for name, p in other.named_parameters())
        found[f"{way}, same objects"] = identities == [*map(id, other.parameters())]
    return found


def one_process_reads(rank: int, folder: str) -> bool:
    """What three ranks saved, in one process without sharding."""
    model = in_double()
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    expected = in_double()
    update(expected, AdamW(groups(expected), lr=0.1), 0, {})
    return all(torch.equal(p, q) for p, q in zip(model.parameters(), expected.parameters(), strict=True))


def test_checkpoints_come_back(tmp_path: Any) -> None:
    for found in run_ranks(checkpoints, 3, str(tmp_path / "saved")):
        assert all(found.values()), found
    assert run_ranks(one_process_reads, 1, str(tmp_path / "saved")) == [True]


@pytest.mark.parametrize("rank", [0, 3])
def test_state_of_parts_over_tensor_ranks(rank: int) -> None:
    """Held whole, or laid out as the parameter was before data ranks got rows of each part."""
    whole = torch.arange(24.0).view(6, 4)
    forget_meshes()
    with fake_mesh(rank, dp=2, tp=2) as mesh:
        before = Placed(mesh["tp"], (Shard(1),))
        part = DTensor.from_local(
            whole[before.block(whole.shape)].contiguous(), mesh["tp"], [Shard(1)], run_check=False
        )
        parameter = nn.Parameter(part.clone())
        optimizer = SGD([parameter], lr=0.1)
        optimizer.state[parameter] = {"plain": whole.clone(), "part": part.clone(), "count": torch.tensor(3.0)}
        assert [one.key for one in held_state({"w": parameter})] == ["part"]
        rows = rows_over(mesh["dp"], before)
        shard_in_place(parameter, whole[rows.block(whole.shape)].contiguous(), mesh["dp"], None)
        for _ in range(2):  # what is split already stays
            shard_optimizer_state(optimizer)
            held = optimizer.state[parameter]
            for key in ("plain", "part"):
                assert placed_as(held[key]) == rows and held[key].shape == whole.shape
                assert torch.equal(held[key].to_local(), whole[rows.block(whole.shape)]), key
            assert float(held["count"]) == 3.0
    forget_meshes()
