"""Parameters become DTensors in place: what stays, what is refused, and whose values count."""

from __future__ import annotations

import copy
import io
import pickle
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.multiprocessing.reductions import StorageWeakRef

from graphcomp.capture import capture
from graphcomp.capture.guards import ModelGuard
from graphcomp.dataparallel.spec import Shards, Spec
from graphcomp.errors import AgreementError, GraphcompError, PlanError, RankFailure, StateError
from graphcomp.ir.digest import digest
from graphcomp.runtime.state.shards import shard_parameters
from graphcomp.testing import run_ranks
from tests.runtime.sharded import alone, data_mesh, full, gradient_of, uneven
from tests.zoo import ZOO

pytestmark = pytest.mark.gloo


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    with alone() as found:
        yield found


def kinds(model: nn.Module) -> dict[str, type]:
    return {name: type(p) for name, p in model.named_parameters()}


def test_a_parameter_becomes_a_dtensor_and_stays_itself(mesh: DeviceMesh) -> None:
    model = uneven()
    before, values = dict(model.named_parameters()), {n: full(p) for n, p in model.named_parameters()}
    model.up.weight.note = "mine"  # type: ignore[assignment]
    shards = shard_parameters(model, mesh)
    assert shards["up.weight"] == Shards(Spec("up.weight", (5, 3), torch.float32, "cpu"), 1)
    assert list(shards) == [name for name in before if name != "scale"]
    assert model.tied.weight is model.up.weight
    for name, parameter in model.named_parameters():
        assert parameter is before[name]
        assert isinstance(parameter, nn.Parameter)
        assert isinstance(parameter, DTensor) == (name != "scale")
        assert parameter.requires_grad == (name != "frozen")
        assert parameter.is_leaf
        assert torch.equal(full(parameter), values[name])
    assert model.up.weight.note == "mine"  # type: ignore[comparison-overlap]
    assert (model.up.weight.placements, model.up.weight.device_mesh) == ((Shard(0),), mesh)


def test_the_memory_of_the_whole_is_let_go(mesh: DeviceMesh) -> None:
    model = uneven()
    model.up.weight.grad = torch.ones(5, 3)
    whole = [StorageWeakRef(t.untyped_storage()) for t in (model.up.weight, model.up.weight.grad, model.down.weight)]
    shard_parameters(model, mesh)
    assert all(storage.expired() for storage in whole)


def test_what_is_sharded_already_stays(mesh: DeviceMesh) -> None:
    model = uneven()
    first, before = shard_parameters(model, mesh), kinds(model)
    model.down.weight = nn.Parameter(distribute_tensor(torch.ones(2, 5), mesh, [Shard(0)]))
    memory = model.down.weight.to_local().data_ptr()
    assert shard_parameters(model, mesh) == first
    assert {**before, "down.weight": DTensor} == kinds(model)
    assert model.down.weight.to_local().data_ptr() == memory


def test_a_gradient_is_sharded_with_its_parameter(mesh: DeviceMesh) -> None:
    model = uneven()
    model(torch.ones(2, 3)).sum().backward()
    before = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    shard_parameters(model, mesh)
    assert isinstance(model.up.weight.grad, DTensor)
    assert all(torch.equal(full(p.grad), before[n]) for n, p in model.named_parameters() if p.grad is not None)
    assert {name for name, p in model.named_parameters() if p.grad is not None} == set(before)


def test_parameters_on_meta_are_left_alone(mesh: DeviceMesh) -> None:
    model = uneven()
    model.down.to("meta")
    assert set(shard_parameters(model, mesh)) == {"up.weight", "up.bias", "one.weight", "frozen"}
    assert type(model.down.weight) is nn.Parameter


def test_layers_that_keep_lists_of_their_weights(mesh: DeviceMesh) -> None:
    model = nn.LSTM(3, 4)
    found = shard_parameters(model, mesh)
    assert len(found) == 4
    assert [reference() for reference in model._flat_weight_refs] == [*model.parameters()] == model._flat_weights
    references = model._flat_weight_refs
    assert shard_parameters(model, mesh) == found
    assert model._flat_weight_refs is references


def of_no_rows() -> nn.Module:
    model = uneven()
    model.empty = nn.Parameter(torch.empty(0, 3))
    model.narrow = nn.Parameter(torch.empty(3, 0))
    return model


def test_a_layer_that_was_refused_has_its_lists_again(mesh: DeviceMesh) -> None:
    model = nn.LSTM(3, 4)
    kept = model.weight_hh_l0.register_hook(lambda gradient: gradient)
    with pytest.raises(StateError, match="'weight_hh_l0' cannot"):
        shard_parameters(model, mesh)
    assert [reference() for reference in model._flat_weight_refs] == [*model.parameters()]
    del kept


def test_parameters_without_elements(mesh: DeviceMesh) -> None:
    model = of_no_rows()
    shards = shard_parameters(model, mesh)
    assert (shards["empty"].padded, shards["narrow"].padded) == ((0, 3), (3, 0))
    assert (model.empty.shape, model.narrow.shape) == ((0, 3), (3, 0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.complex64, torch.int8, torch.bool])
def test_any_dtype(mesh: DeviceMesh, dtype: torch.dtype) -> None:
    model = uneven()
    model.up.bias = nn.Parameter(torch.ones(5).to(dtype), requires_grad=dtype.is_floating_point)
    assert shard_parameters(model, mesh)["up.bias"].spec.dtype is dtype
    assert torch.equal(full(model.up.bias), torch.ones(5).to(dtype))


# What the program sees


@pytest.mark.parametrize("name", ["tied_gpt", "half_frozen", "moe"])
def test_the_joint_program_is_that_of_the_whole_parameters(mesh: DeviceMesh, name: str) -> None:
    case = ZOO[name]
    model = case.build()
    batch = case.microbatches(1)[0]
    guard = ModelGuard(model, case.loss_fn)
    before, key = capture(model, case.loss_fn, batch), guard.key()
    shard_parameters(model, mesh)
    after = capture(model, case.loss_fn, batch)
    assert str(after) == str(before)
    assert digest(after.program) == digest(before.program)
    assert guard.key() == key
    assert guard.key() is guard.key()  # and the quick comparison holds


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("held", ["frozen", "up.weight"])
def test_code_that_holds_a_sharded_parameter_by_itself(mesh: DeviceMesh, held: str, training: bool) -> None:
    model = uneven()
    shard_parameters(model, mesh)
    weight = model.get_parameter(held)
    with pytest.raises(StateError, match="sharded parameter that it does not read as an attribute"):
        capture(model, lambda output, batch: output.sum() * weight.sum(), torch.ones(3, 3), training=training)
    capture(model, lambda output, batch: output.sum() * model.up.weight.sum() * model.frozen.sum(), torch.ones(3, 3))


# What becomes of a sharded parameter in the user's hands


def test_it_takes_whole_values_and_notices_others(mesh: DeviceMesh) -> None:
    model, other = uneven(), uneven(1)
    shard_parameters(model, mesh)
    assert all(isinstance(value, DTensor) == (n != "scale") for n, value in model.state_dict().items())
    assert list(model.state_dict()) == list(other.state_dict())
    model.load_state_dict(other.state_dict())
    assert all(torch.equal(full(p), q) for p, q in zip(model.parameters(), other.parameters(), strict=True))
    model.up.weight.data = torch.zeros(5, 3)
    assert not full(model.up.weight).any()
    model.up.weight.data.fill_(3.0)
    assert (full(model.up.weight) == 3.0).all()
    model.up.weight.data = distribute_tensor(torch.ones(5, 3), mesh, [Shard(0)])
    assert (full(model.up.weight) == 1.0).all()
    for wrong in (torch.zeros(3, 5), torch.zeros(5, 3).double(), distribute_tensor(torch.ones(5, 3), mesh)):
        with pytest.raises(StateError, match="expected: a float32 DTensor of shape"):
            model.up.weight.data = wrong


def test_it_follows_its_module_to_another_dtype(mesh: DeviceMesh) -> None:
    model = uneven()
    weight, values = model.up.weight, full(model.up.weight)
    shard_parameters(model, mesh)
    weight.grad = torch.ones_like(weight)
    model.double()
    assert model.up.weight is weight
    assert (weight.dtype, weight.grad.dtype) == (torch.float64, torch.float64)
    assert torch.equal(full(weight), values.double())


def test_copies_and_files_hold_plain_dtensors(mesh: DeviceMesh) -> None:
    model = uneven()
    shard_parameters(model, mesh)
    model.up.weight.grad = torch.ones_like(model.up.weight)
    model.up.weight.note = ["mine"]  # type: ignore[assignment]
    copied = copy.deepcopy(model)
    assert copied.tied.weight is copied.up.weight
    assert (copied.up.weight.note, copied.up.weight.note is model.up.weight.note) == (["mine"], False)
    with torch.no_grad():
        model.up.weight.fill_(0.0)
        model.up.weight.grad.fill_(0.0)
    file = io.BytesIO()
    torch.save(copied.state_dict(), file)
    file.seek(0)
    for found in (copied.up.weight, pickle.loads(pickle.dumps(copied)).up.weight, torch.load(file)["up.weight"]):
        assert type(found) is DTensor
        assert torch.equal(full(found), full(uneven().up.weight))
    assert (full(copied.up.weight.grad) == 1.0).all()


# What cannot be sharded in place


def keeps_weakly(model: nn.Module) -> Any:
    return weakref.ref(model.down.weight)


def keeps_a_graph(model: nn.Module) -> Any:
    return model(torch.ones(2, 3))


def hooks(model: nn.Module) -> Any:
    return model.down.weight.register_hook(lambda gradient: gradient)


def is_a_view(model: nn.Module) -> None:
    model.down.weight = nn.Parameter(model.up.weight.detach()[:2])


def is_seen_by_a_buffer(model: nn.Module) -> None:
    model.register_buffer("view", model.down.weight.detach()[0])


class Special(nn.Parameter):
    pass


def is_special(model: nn.Module) -> None:
    model.down.weight = Special(torch.ones(2, 5))


def is_transposed(model: nn.Module) -> None:
    model.down.weight = nn.Parameter(torch.ones(5, 2).t())


def is_replicated(model: nn.Module) -> None:
    model.down.weight = nn.Parameter(distribute_tensor(torch.ones(2, 5), data_mesh(), [Replicate()]))


def has_a_sparse_gradient(model: nn.Module) -> None:
    model.down.weight.grad = torch.ones(2, 5).to_sparse()


def is_factored(model: nn.Module) -> Any:
    optimizer = torch.optim.Adafactor(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    model.zero_grad()
    return optimizer


REFUSED = [
    (keeps_weakly, "a weak reference to it"),
    (keeps_a_graph, "an autograd graph"),
    (hooks, "a gradient hook"),
    (is_a_view, "'down.weight' cannot.*\n.*shares memory with 'up.weight'|'up.weight' cannot.*\n.*'down.weight'"),
    (is_seen_by_a_buffer, "shares memory with 'view'"),
    (is_special, "of class Special"),
    (is_transposed, r"strides \(1, 2\)"),
    (is_replicated, r"a DTensor already, \(Replicate\(\),\)"),
    (has_a_sparse_gradient, "gradient of another kind"),
    (is_factored, "Adafactor holds 'row_var' for parameter 'up.weight'"),
]


@pytest.mark.parametrize(("spoil", "says"), REFUSED, ids=lambda part: getattr(part, "__name__", ""))
def test_refused_by_name_before_any_effect(mesh: DeviceMesh, spoil: Callable[[nn.Module], Any], says: str) -> None:
    model = uneven()
    kept = spoil(model)
    before = kinds(model)
    with pytest.raises(StateError, match=says):
        shard_parameters(model, mesh)
    assert kinds(model) == before
    del kept


def test_an_older_graph_whose_backward_has_run_is_no_hindrance(mesh: DeviceMesh) -> None:
    model = uneven()
    loss = model(torch.ones(2, 3)).sum()
    loss.backward()
    shard_parameters(model, mesh)
    assert isinstance(model.up.weight.grad, DTensor)


def test_one_axis_only() -> None:
    class Two:
        ndim = 2

    with pytest.raises(PlanError, match="over one mesh axis"):
        shard_parameters(uneven(), Two())  # type: ignore[arg-type]


# Several ranks


def starts_differently(rank: int) -> dict[str, Tensor]:
    model = uneven(seed=rank)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, rank) if parameter.requires_grad else None
    shards = shard_parameters(model, data_mesh())
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            assert parameter.to_local().shape[0] == shards[name].rows_of(rank)
    found = {name: full(p) for name, p in model.named_parameters()}
    return {**found, "gradient": full(model.up.weight.grad)}


@pytest.mark.parametrize("ranks", [2, 3])
def test_all_ranks_get_the_values_of_the_first(ranks: int) -> None:
    expected = {name: full(p) for name, p in uneven(seed=0).named_parameters()}
    for found in run_ranks(starts_differently, ranks):
        gradient = found.pop("gradient")
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        chunk = -(-5 // ranks)
        assert gradient[:, 0].tolist() == [float(row // chunk) for row in range(5)]  # every rank's own rows


def disagrees(rank: int) -> list[str]:
    """One rank cannot, or has something else: all raise, and none has changed."""
    said = []
    for way in ("weak", "hidden", "state"):
        model = uneven()
        kept: Any = keeps_weakly(model) if way == "weak" and rank == 1 else None
        if way == "hidden" and rank == 1:
            model.more = nn.Parameter(torch.ones(3))
        if way == "state" and rank == 1:
            kept = torch.optim.Adagrad(model.parameters())
        before = kinds(model)
        try:
            shard_parameters(model, data_mesh())
        except GraphcompError as error:
            said.append(f"{type(error).__name__}: {error}")
        assert kinds(model) == before
        del kept
    return said


def test_all_ranks_or_none() -> None:
    first, second = run_ranks(disagrees, 2)
    assert first[0].startswith(RankFailure.__name__)
    assert "data rank 1" in first[0]
    assert second[0].startswith(StateError.__name__)
    for one in (first, second):
        assert one[1].startswith(AgreementError.__name__)
        assert "expected: 'up.weight' (5, 3)" in one[1]
        assert "got: 'more' (3,)" in one[1]
        assert "expected: no more parameters" in one[2]
        assert "got: Adagrad holds 'sum' for 'down.bias'" in one[2]


def rows_of_gradients(rank: int) -> list[int]:
    model = of_no_rows()
    shards = shard_parameters(model, data_mesh())
    model.up.weight.grad = None
    assert full(model.up.weight).shape == (5, 3)
    assert gradient_of(model.up.weight, 0).shape == (5, 3)
    return [shards[name].rows_of(rank) for name in ("up.weight", "one.weight", "empty", "narrow")]


def test_trailing_ranks_may_have_no_rows() -> None:
    assert run_ranks(rows_of_gradients, 4) == [[2, 1, 0, 1], [2, 0, 0, 1], [1, 0, 0, 1], [0, 0, 0, 0]]
