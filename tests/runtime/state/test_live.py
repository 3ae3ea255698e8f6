"""The model's state between steps: buffers written at the end of one, parameters whole and sharded, gradients."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import graphcomp as gc
from graphcomp.dataparallel.rows import padded_rows
from graphcomp.errors import StateError
from graphcomp.runtime.state.live import LiveState
from graphcomp.runtime.state.shards import shard_parameters
from graphcomp.testing import run_ranks
from tests.runtime.sharded import alone, data_mesh


class Swaps(nn.Module):
    """New values of buffers are other buffers as they were, in both orders of registration."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        for number, name in enumerate(("now", "before", "left", "right")):
            self.register_buffer(name, torch.full((), float(number)))

    def forward(self, x: Tensor) -> Tensor:
        self.before, self.now = self.now, self.now + 1
        self.left, self.right = self.right, self.left
        return self.layers(x)


@pytest.mark.parametrize("microbatches", [1, 2, 3])
def test_a_buffer_takes_over_the_old_value_of_another(microbatches: int) -> None:
    batches = [torch.ones(3, 4)] * microbatches
    eager, model = Swaps(), Swaps()
    for batch in batches:
        eager(batch)
    step = gc.compile_train_step(
        model, lambda output, batch: output.square().mean(), plan=gc.Plan(backend="eager", quiet=True)
    )
    step(batches)
    assert list(map(float, model.buffers())) == list(map(float, eager.buffers()))


# Sharded parameters


class Watched(nn.Module):
    """One sharded parameter of uneven rows, one number, and a buffer that steps write."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(6, dtype=dtype).view(3, 2))
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.register_buffer("seen", torch.zeros(2))


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    with alone() as found:
        yield found


@pytest.mark.gloo
def test_a_sharded_parameter_is_there_in_form_only(mesh: DeviceMesh) -> None:
    model = Watched()
    shard_parameters(model, mesh)
    state = LiveState(model)
    form = state.parameters()["weight"]
    assert type(form) is Tensor
    assert (form.device.type, form.shape, form.stride(), form.dtype) == ("meta", (3, 2), (2, 1), torch.float32)
    assert state.parameters()["scale"] is model.scale
    state.require_real({"weight", "scale", "seen"})


@pytest.mark.gloo
def test_rows_are_read_anew_each_time(mesh: DeviceMesh) -> None:
    model = Watched()
    shard_parameters(model, mesh)
    state = LiveState(model)
    assert set(state.shards()) == {"weight"}
    assert state.shards()["weight"].data_ptr() == model.weight.to_local().data_ptr()
    with torch.no_grad():
        model.weight.add_(1.0)
    assert state.shards()["weight"].tolist() == [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]
    model.weight.data = torch.zeros(3, 2)
    assert not state.shards()["weight"].any()
    model.weight = nn.Parameter(distribute_tensor(torch.ones(3, 2), mesh, [Shard(0)]))
    assert (state.shards()["weight"] == 1.0).all()


@pytest.mark.gloo
def test_rows_of_another_form_are_noticed(mesh: DeviceMesh) -> None:
    model = Watched()
    shard_parameters(model, mesh)
    state = LiveState(model)
    model.double()
    for use in (state.shards, lambda: state.commit({"weight": torch.ones(3, 2)}, {})):
        with pytest.raises(StateError, match=r"rows of parameter 'weight' were replaced(.|\n)*float32(.|\n)*float64"):
            use()
    assert model.weight.grad is None
    state.refresh()
    assert state.shards()["weight"].dtype is torch.float64


@pytest.mark.gloo
def test_a_dtensor_of_another_kind_is_refused(mesh: DeviceMesh) -> None:
    model = Watched()
    model.weight = nn.Parameter(distribute_tensor(torch.ones(3, 2), mesh, [Replicate()]))
    with pytest.raises(StateError, match=r"'weight' is a DTensor(.|\n)*Replicate"):
        LiveState(model)


@pytest.mark.gloo
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_rows_are_added_up(mesh: DeviceMesh, dtype: torch.dtype) -> None:
    model = Watched(dtype)
    shard_parameters(model, mesh)
    state = LiveState(model)
    for number in (1.0, 2.0):
        state.commit({"weight": torch.full((3, 2), number), "scale": torch.tensor(number)}, {"seen": torch.ones(2)})
    gradient = model.weight.grad
    assert isinstance(gradient, DTensor)
    assert (gradient.placements, gradient.device_mesh, gradient.dtype) == ((Shard(0),), mesh, dtype)
    assert gradient.full_tensor().tolist() == [[3.0, 3.0]] * 3
    assert (type(model.scale.grad), float(model.scale.grad), model.seen.tolist()) == (Tensor, 3.0, [1.0, 1.0])
    model.zero_grad(set_to_none=False)
    assert model.weight.grad is gradient
    state.commit({"weight": torch.ones(3, 2)}, {})
    assert model.weight.grad is gradient
    assert gradient.full_tensor().tolist() == [[1.0, 1.0]] * 3


@pytest.mark.gloo
def test_nothing_is_written_where_a_gradient_does_not_fit(mesh: DeviceMesh) -> None:
    model = Watched()
    shard_parameters(model, mesh)
    state = LiveState(model)
    model.weight.grad = distribute_tensor(torch.ones(3, 2), mesh, [Replicate()])
    given = {"scale": torch.tensor(1.0), "weight": torch.ones(3, 2)}
    with pytest.raises(StateError, match=r"'weight' cannot(.|\n)*\(Shard\(dim=0\),\)(.|\n)*\(Replicate\(\),\)"):
        state.commit(given, {"seen": torch.ones(2)})
    assert model.scale.grad is None
    assert (model.weight.grad.full_tensor() == 1.0).all()
    assert not model.seen.any()


def rows_and_gradients(rank: int) -> tuple[Tensor, Tensor, Tensor]:
    model = Watched()
    shards = shard_parameters(model, data_mesh())
    state = LiveState(model)
    rows = state.shards()["weight"]
    whole = torch.arange(6.0).view(3, 2) * 10
    for _ in range(2):
        state.commit({"weight": padded_rows(shards["weight"], whole, rank)}, {})
    return rows, model.weight.grad.full_tensor(), model.weight.full_tensor()


@pytest.mark.gloo
def test_rows_are_padded_and_gradients_are_cut() -> None:
    found = run_ranks(rows_and_gradients, 2)
    assert [rows.tolist() for rows, *_ in found] == [[[0.0, 1.0], [2.0, 3.0]], [[4.0, 5.0], [0.0, 0.0]]]
    for _, gradient, whole in found:
        assert gradient.tolist() == [[0.0, 20.0], [40.0, 60.0], [80.0, 100.0]]
        assert whole.tolist() == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]


# What a step writes is made ready first


def test_nothing_is_written_before_it_is_asked_for() -> None:
    model = Watched()
    writes = LiveState(model).writes({"weight": torch.ones(3, 2), "scale": torch.ones(())}, {"seen": torch.ones(2)})
    assert model.weight.grad is model.scale.grad is None and not model.seen.any()
    writes.write()
    assert model.weight.grad.tolist() == [[1.0, 1.0]] * 3 and model.seen.tolist() == [1.0, 1.0]


def in_inference_mode() -> Tensor:
    with torch.inference_mode():
        return torch.zeros(3, 2)


@pytest.mark.parametrize(
    ("gradient", "got"),
    [
        (torch.zeros(1).expand(3, 2), "an expanded view"),
        (in_inference_mode(), "made in inference mode"),
        (torch.zeros(3, 2).to_sparse(), "torch.sparse_coo"),
    ],
)
def test_a_gradient_that_cannot_be_added_to_is_refused_before_anything_is_written(gradient: Tensor, got: str) -> None:
    model = Watched()
    model.weight.grad = gradient
    with pytest.raises(StateError, match=rf"gradient of parameter 'weight' cannot be written in place(.|\n)*{got}"):
        LiveState(model).commit({"scale": torch.ones(()), "weight": torch.ones(3, 2)}, {"seen": torch.ones(2)})
    assert model.scale.grad is None and not model.seen.any()


def test_a_buffer_that_cannot_be_written_is_refused_before_anything_is_written() -> None:
    model = Watched()
    model.seen = torch.zeros(1).expand(2)
    with pytest.raises(StateError, match=r"buffer 'seen' cannot be written in place(.|\n)*an expanded view"):
        LiveState(model).commit({"scale": torch.ones(())}, {"seen": torch.ones(2)})
    assert model.scale.grad is None
