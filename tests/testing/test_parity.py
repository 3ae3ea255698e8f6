"""Parity checks: they pass on the zoo, name the first difference, and leave the model alone."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphcomp as gc
from graphcomp.errors import ParityError, StepError
from graphcomp.testing import check_parity, run_virtual
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
        self.calls = itertools.count(1)

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


def test_the_tolerance_can_be_given_and_follows_the_dtype() -> None:
    case = ZOO["u_shape"]
    with pytest.raises(ParityError, match="a relative difference of at most -1e"):
        check_parity(case.build(), case.loss_fn, case.microbatches(1), plan=eager(), tolerance=-1.0)
    model = case.build().double()
    assert all(row.relative <= 1e-12 for row in check_parity(model, case.loss_fn, _double(case), plan=eager(4)))


def _double(case: Any) -> list[Any]:
    return case.microbatches(2, 0, torch.float64)


def test_random_models_can_be_compared_only_where_the_draws_are_eagers() -> None:
    case = ZOO["dropout"]
    model = case.build()
    before = snapshot(model)
    with pytest.raises(StepError) as caught:
        check_parity(model, case.loss_fn, case.microbatches(2), plan=eager(2))
    assert str(caught.value).startswith("a model with random operations cannot be compared with eager under a cut plan")
    assert same(before, snapshot(model))
    check_parity(model.eval(), case.loss_fn, case.microbatches(2), plan=eager(2))


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
