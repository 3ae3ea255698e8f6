"""Parity checks: they pass on the zoo, name the first difference, and leave the model alone."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import graphcomp as gc
from graphcomp.compat.sharded import local_rows
from graphcomp.errors import BatchError, ParityError, PlanError
from graphcomp.ir.randomness import step_seeds
from graphcomp.testing import check_parity, run_ranks, run_virtual
from tests.zoo import ZOO
from tests.zoo.reference import reference


def eager(stages: int = 1) -> gc.Plan:
    return gc.Plan(stages=stages, backend="eager", quiet=True)


def snapshot(model: nn.Module) -> list[Any]:
    """Everything of a model, with the identity of its parameters, and the state of the random stream."""
    found: list[Any] = [torch.get_rng_state()]
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        found += [name, id(tensor), tensor.detach().clone(), id(tensor.grad), tensor.requires_grad]
        found.append(None if tensor.grad is None else tensor.grad.clone())
    for name, module in model.named_modules():
        found.append((name, type(module), module.training, sorted(vars(module))))
    return found


def same(one: list[Any], two: list[Any]) -> bool:
    return len(one) == len(two) and all(
        torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in zip(one, two, strict=True)
    )


@pytest.mark.parametrize(("name", "stages"), [("two_losses", 2), ("batch_norm", 3), ("dropout", 1)])
def test_it_passes_on_the_zoo_and_leaves_the_model(name: str, stages: int) -> None:
    case = ZOO[name]
    model = case.build()
    for parameter in list(model.parameters())[::2]:
        if parameter.requires_grad:
            parameter.grad = torch.ones_like(parameter)
    before = snapshot(model)
    table = check_parity(model, case.loss_fn, case.microbatches(3), plan=eager(stages))
    assert same(before, snapshot(model))
    expected = reference(model, case.loss_fn, case.microbatches(3))
    rows = {(row.kind, row.name): row for row in table}
    assert len(rows) == len(table)
    named = {"loss": {"loss", *expected.losses}, "metric": expected.metrics, "gradient": expected.gradients}
    for kind, names in named.items():
        assert {row.name for row in table if row.kind == kind} == set(names)
    changed = {key for key, b in model.named_buffers() if not torch.equal(b, expected.buffers[key])}
    assert {row.name for row in table if row.kind == "buffer"} == changed
    assert all(0 <= row.relative <= 1e-5 for row in table)
    assert all(row.absolute == 0 for row in table if row.kind == "gradient")
    assert str(table).splitlines()[0].split() == ["kind", "name", "absolute", "relative"]
    assert len(str(table).splitlines()) == 1 + len(table)
    worst = table.worst("loss")
    assert worst is not None and worst.relative == max(row.relative for row in table if row.kind == "loss")
    assert table.worst("nothing") is None


def test_it_compares_a_step_that_is_there_already() -> None:
    case = ZOO["gpt"]
    model = case.build()
    step = gc.compile_train_step(model, case.loss_fn, plan=eager())
    step(case.microbatches(2))
    before = snapshot(model)
    assert len(check_parity(model, case.loss_fn, case.microbatches(3, 5), step=step)) > 10
    assert same(before, snapshot(model))
    assert step.stats.traces == 1


class Counting(nn.Module):
    """Eager counts its calls in a way that no guard can see; a program keeps the number of the capture."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 2)
        self.calls = itertools.count(2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).relu()
        return self.second(hidden * next(self.calls))  # the line to name


def mean(output: Tensor, batch: Tensor) -> Tensor:
    return output.square().mean()


@pytest.mark.parametrize("stages", [1, 2])
def test_a_difference_is_named_with_its_node_module_and_line(stages: int) -> None:
    model, batches = Counting(), [torch.randn(3, 4)] * 2
    model.first.bias.grad = torch.ones(8)
    before = snapshot(model)
    with pytest.raises(ParityError) as caught:
        check_parity(model, mean, batches, plan=eager(stages))
    assert same(before, snapshot(model))
    text = str(caught.value)
    assert text.startswith("loss 'loss' differs from eager PyTorch\n  where: node mul")
    with open(__file__) as source:
        line = next(i for i, each in enumerate(source, 1) if "# the line to name" in each)
    where = text.splitlines()[1]
    assert "(aten.mul.Tensor), module ''" in where and f"test_parity.py:{line}" in where
    assert "\n  expected: a relative difference of at most 1e-05\n  got: " in text


class Turning(nn.Module):
    """Eager differs from the program in the imaginary part of a gradient alone."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.ones(4, dtype=torch.complex64))
        self.calls = itertools.count(2)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.turn.real + x * self.turn.imag * next(self.calls)


def test_complex_gradients_are_compared_whole() -> None:
    with pytest.raises(ParityError, match="gradient 'turn' differs"):
        check_parity(Turning(), mean, [torch.randn(3, 4)], plan=eager())


def test_the_tolerance_can_be_given_and_follows_the_dtype() -> None:
    case = ZOO["u_shape"]
    with pytest.raises(ParityError, match="a relative difference of at most -1e"):
        check_parity(case.build(), case.loss_fn, case.microbatches(1), plan=eager(), tolerance=-1.0)
    model = case.build().double()
    assert all(row.relative <= 1e-12 for row in check_parity(model, case.loss_fn, _double(case), plan=eager(4)))


def _double(case: Any) -> list[Any]:
    return case.microbatches(2, 0, torch.float64)


@pytest.mark.parametrize("data_ranks", [1, 2])
def test_random_models_are_compared_with_the_program_that_was_cut(
    data_ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = ZOO["dropout"]
    model = case.build()
    batches: list[Any] = case.microbatches(3)
    given = batches if data_ranks == 1 else [batches[:2], batches[2:]]
    before = snapshot(model)
    table = check_parity(model, case.loss_fn, given, plan=eager(2), data_ranks=data_ranks)
    assert same(before, snapshot(model))
    assert {row.name for row in table if row.kind == "gradient"} == {name for name, _ in model.named_parameters()}
    assert all(row.absolute == 0 for row in table if row.kind == "gradient")
    # The step's microbatches get each other's masks.
    monkeypatch.setattr("graphcomp.engine.step_seeds", lambda count: step_seeds(count)[::-1])
    with pytest.raises(ParityError, match="'loss' differs from the uncut program\n  where: behind the capture"):
        check_parity(model, case.loss_fn, given, plan=eager(2), data_ranks=data_ranks)


class CountingDropout(Counting):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(super().forward(x), 0.25)


def test_the_capture_of_a_random_model_is_compared_with_eager() -> None:
    with pytest.raises(ParityError, match="'loss' differs from eager PyTorch\n  where: node mul"):
        check_parity(CountingDropout(), mean, [torch.randn(3, 4)] * 2, plan=eager(2))


OVER_DATA_RANKS = [(2, "replicate", False), (1, "shard", False), (2, "shard", True)]


@pytest.mark.parametrize(("stages", "parameters", "regather"), OVER_DATA_RANKS)
def test_virtual_data_ranks(stages: int, parameters: Any, regather: bool) -> None:
    case = ZOO["two_losses"]
    plan = replace(eager(stages), parameters=parameters, regather=regather)
    given = [case.microbatches(2, 0), case.microbatches(2 if regather else 1, 7)]
    model = case.build()
    before = snapshot(model)
    table = check_parity(model, case.loss_fn, given, plan=plan, data_ranks=2)
    assert same(before, snapshot(model))
    expected = reference(model, case.loss_fn, [batch for line in given for batch in line])
    assert {row.name for row in table if row.kind == "gradient"} == set(expected.gradients)
    assert {row.name for row in table if row.kind == "metric"} == set(expected.metrics)
    assert all(row.relative <= 1e-5 for row in table)


def last(output: Tensor, batch: Tensor) -> Any:
    return output.square().mean(), {"last": gc.metric(batch.sum(), "last")}


def test_a_last_value_is_that_of_the_first_data_rank() -> None:
    given = [[torch.full((2, 3), value) for value in line] for line in ((1.0, 2.0), (3.0,))]
    table = check_parity(Partly(), last, given, plan=eager(), data_ranks=2)
    assert [row.absolute for row in table if row.kind == "metric"] == [0.0]
    first, _ = run_virtual(Partly(), last, given, plan=eager(), data_ranks=2)
    assert first.metrics["last"].item() == 2.0 * 6


def test_a_difference_over_data_ranks_is_named() -> None:
    with pytest.raises(ParityError, match="where: node mul"):
        check_parity(Counting(), mean, [[torch.randn(3, 4)]] * 2, plan=eager(), data_ranks=2)


def test_what_cannot_be_compared() -> None:
    case = ZOO["mlp"]
    model = case.build()
    step = gc.compile_train_step(model, case.loss_fn, plan=eager())
    with pytest.raises(PlanError, match="the number of data ranks is that of the mesh"):
        check_parity(model, case.loss_fn, [case.microbatches(1)] * 2, step=step, data_ranks=2)
    with pytest.raises(BatchError, match="every data rank needs a list of microbatches"):
        check_parity(model, case.loss_fn, [case.microbatches(1)], plan=eager(), data_ranks=2)


COMPARED = [("mlp", "replicate"), ("dropout", "shard")]


def in_processes(rank: int) -> list[Any]:
    """Two data ranks; each gives its own microbatches and compares what it has."""
    mesh, found = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)), []
    for name, parameters in COMPARED:
        case, model = ZOO[name], ZOO[name].build()
        plan = gc.Plan(mesh=mesh, parameters=parameters, backend="eager", quiet=True, deadline=60.0)
        grown = next(model.parameters())
        grown.grad = torch.ones_like(grown)
        torch.manual_seed(rank)  # what the first rank draws, counts
        table = check_parity(model, case.loss_fn, case.microbatches(2 - rank, rank), plan=plan)
        held = [p for p in model.parameters() if p.grad is not None]
        kept = len(held) == 1 and held[0] is grown and bool((local_rows(grown.grad) == 1).all())
        found.append((kept, [(row.kind, row.name, row.relative) for row in table]))
    model = ZOO["mlp"].build()
    step = gc.compile_train_step(model, ZOO["mlp"].loss_fn, plan=plan)
    step(ZOO["mlp"].microbatches(1, rank))  # its parameters are sharded from here on
    check_parity(model, ZOO["mlp"].loss_fn, ZOO["mlp"].microbatches(1 + rank, rank), step=step)
    with pytest.raises(ParityError) as caught:
        check_parity(Counting(), mean, [torch.randn(3, 4)], plan=plan)
    return [*found, str(caught.value)]


@pytest.mark.gloo
def test_processes_compare_over_the_microbatches_of_all_data_ranks() -> None:
    for *found, difference in run_ranks(in_processes, 2, timeout=200):
        for (name, _), (kept, rows) in zip(COMPARED, found, strict=True):
            assert kept and all(relative <= 1e-5 for _, _, relative in rows)
            names = {key for kind, key, _ in rows if kind == "gradient"}
            assert names == {key for key, _ in ZOO[name].build().named_parameters()}
        assert "where: node mul" in difference


class Partly(nn.Module):
    """Used, unused, used through detach only, and frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused, self.detached, self.frozen = (nn.Linear(3, 3) for _ in range(4))
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(self.used(x)) + self.detached(x).detach()


@pytest.mark.parametrize("stages", [1, 2])
def test_virtual_gradients_hold_every_trainable_name(stages: int) -> None:
    model = Partly()
    batches = [torch.randn(2, 3), torch.randn(4, 3)]
    result, gradients = run_virtual(model, mean, batches, plan=eager(stages))
    expected = reference(model, mean, batches)
    assert list(gradients) == [name for name, p in model.named_parameters() if p.requires_grad]
    assert {name for name, grad in gradients.items() if grad is None} == {
        f"{module}.{name}" for module in ("unused", "detached") for name in ("weight", "bias")
    }
    for name, grad in expected.gradients.items():
        assert grad is gradients[name] is None or torch.equal(grad, gradients[name]), name
    assert result.loss.item() == pytest.approx(expected.loss.item(), rel=1e-6)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert any(row.kind == "gradient" for row in check_parity(model, mean, batches, plan=eager(stages)))


def test_virtual_ranks_commit_buffers_and_rebuild_outputs() -> None:
    case = ZOO["batch_norm"]
    model = case.build()
    batches = case.microbatches(3)
    expected = reference(model, case.loss_fn, batches)
    result, _ = run_virtual(model, case.loss_fn, batches, plan=eager(3), outputs="all")
    assert all(torch.equal(buffer, expected.buffers[name]) for name, buffer in model.named_buffers())
    assert result.outputs is not None
    assert all(torch.equal(one, two) for one, two in zip(result.outputs, expected.outputs, strict=True))
