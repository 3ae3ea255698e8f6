"""Data ranks whose microbatches are of different kinds: other programs, lengths, losses, parameters, first values."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import sympy
import torch
from torch import Tensor, nn

import graphcomp as gc
from graphcomp.errors import AgreementError
from graphcomp.ir.signature import Size
from graphcomp.testing import VirtualStep, run_ranks
from tests.sharing import shared_captures
from tests.steps.test_data_processes import MODES, full, mesh_of, numbers, plan_of
from tests.zoo import ZOO
from tests.zoo.reference import Reference, reference


class Forks(nn.Module):
    """Layers of which the batch's own field chooses: "b" has one more, in the middle, and a loss of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6, dtype=torch.float64) for _ in range(4))
        self.extra, self.unused = (nn.Linear(6, 6, dtype=torch.float64) for _ in range(2))

    def forward(self, x: Tensor, which: str) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            if number == 1 and which == "b":
                x = torch.tanh(self.extra(x))
        return x


def forks() -> Forks:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Forks()


def named(output: Tensor, batch: dict[str, Any]) -> dict[str, Any]:
    losses: dict[str, Any] = {"main": gc.TokenLoss(output.square().sum(), output.shape[0])}
    if batch["which"] == "b":
        losses["extra"] = gc.TokenLoss(output.abs().sum(), torch.full((), 0.5, dtype=torch.float64))
    return losses


def batch(which: str, rows: int) -> dict[str, Any]:
    drawn = torch.Generator().manual_seed(rows)
    return {"x": torch.randn(rows, 6, dtype=torch.float64, generator=drawn), "which": which}


ORDERS = ("ab", "ba", "aa")
LINES = {order: [[batch(which, 3 + 2 * i), batch(which, 4 + i)] for i, which in enumerate(order)] for order in ORDERS}


@functools.cache
def eager(order: str) -> Reference:
    return reference(forks(), named, [one for line in LINES[order] for one in line])


class Conditional:
    """Compiles as the eager backend does, and says that the first program it compiles needs ten rows or more."""

    def __init__(self, step: Any) -> None:
        self.backend, self.program = step.compiler.backend, None
        step.compiler.backend = self

    def __getattr__(self, name: str) -> Any:
        return getattr(self.backend, name)

    def compile(self, program: Any, *groups: Any) -> Any:
        self.program = self.program or program
        compiled = self.backend.compile(program, *groups)
        if program is not self.program:
            return compiled
        size = next(role.symbol for role in program.inputs if isinstance(role, Size))
        return replace(compiled, conditions=(sympy.Ge(sympy.Symbol(size, integer=True, positive=True), 10),))


def on_rank(rank: int, world_size: int) -> dict[Any, Any]:
    with shared_captures():
        found = in_turn(rank, world_size)
    if world_size == 2:
        found["conditions"] = conditional(rank)
    return found


def in_turn(rank: int, world_size: int) -> dict[Any, Any]:
    mesh = mesh_of("dp2" if world_size == 2 else "pp2 x dp2")
    data_rank = mesh["dp"].get_local_rank()
    found: dict[Any, Any] = {}
    for mode in MODES:
        for order in ORDERS[:2]:
            model = forks()
            step = gc.compile_train_step(model, named, plan=plan_of(mesh, mode))
            for lines in (order, "aa"):
                model.zero_grad()
                result = step(LINES[lines][data_rank])
                gradients = {key: None if p.grad is None else full(p.grad) for key, p in step.named_parameters()}
                found[mode, order, lines] = numbers(result), gradients
    model = ZOO["gpt"].build(seed=data_rank).double()  # data rank 1 begins with other values
    step = gc.compile_train_step(model, ZOO["gpt"].loss_fn, plan=plan_of(mesh, "replicate"))
    batches = ZOO["gpt"].microbatches(2, 5, torch.float64)
    result = step(batches[data_rank : data_rank + 1])
    found["starts"] = numbers(result), {key: full(p) for key, p in step.named_parameters()}
    return found


def conditional(rank: int) -> tuple[float, int, Tensor | None]:
    """A condition, which is added to a capture, and broken on rank 1 alone."""
    model = forks()
    step = gc.compile_train_step(model, named, plan=plan_of(mesh_of("dp2"), "replicate"))
    Conditional(step)
    result = step([batch("a", (12, 5)[rank])])
    return result.loss.item(), step.stats.traces, model.layers[0].weight.grad


@functools.cache
def ranks(world_size: int) -> list[dict[Any, Any]]:
    return run_ranks(on_rank, world_size, world_size, timeout=200)


def equal(found: Tensor | None, expected: Tensor | None, what: str) -> None:
    assert (found is None) == (expected is None), what
    if found is not None and expected is not None:
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12, msg=lambda text: f"{what}: {text}")


@pytest.mark.gloo
@pytest.mark.parametrize("order", ORDERS[:2])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("world_size", [2, 4])
def test_a_loss_and_a_parameter_that_only_one_data_rank_has(world_size: int, mode: str, order: str) -> None:
    for lines in (order, "aa"):  # then nobody has them: no gradient, though programs for it are known
        expected, found = eager(lines), [each[mode, order, lines] for each in ranks(world_size)]
        for reported, gradients in found:
            assert reported == found[0][0]
            for key, gradient in gradients.items():
                equal(gradient, expected.gradients[key], key)
        assert found[0][0]["loss"] == pytest.approx(float(expected.loss), rel=1e-9)
        assert ("tokens extra" in found[0][0]) == ("b" in lines)
        reached = {key for _, gradients in found for key, gradient in gradients.items() if gradient is not None}
        assert reached == {key for key, gradient in expected.gradients.items() if gradient is not None}


@pytest.mark.gloo
@pytest.mark.parametrize("world_size", [2, 4])
def test_all_begin_with_the_values_of_the_first(world_size: int) -> None:
    model, found = ZOO["gpt"].build(seed=0).double(), [each["starts"] for each in ranks(world_size)]
    expected = reference(model, ZOO["gpt"].loss_fn, ZOO["gpt"].microbatches(2, 5, torch.float64))
    for reported, parameters in found:
        assert reported == found[0][0]
        assert reported["loss"] == pytest.approx(float(expected.loss), rel=1e-9)
        for key, parameter in parameters.items():
            assert torch.equal(parameter, model.get_parameter(key)), key


@pytest.mark.gloo
def test_a_condition_that_one_data_rank_breaks() -> None:
    expected = reference(forks(), named, [batch("a", 12), batch("a", 5)])
    traces = []
    for each in ranks(2):
        loss, made, gradient = each["conditions"]
        traces.append(made)
        assert loss == pytest.approx(float(expected.loss), rel=1e-9)
        equal(gradient, expected.gradients["layers.0.weight"], "weight")
    assert traces == [1, 2]


def test_gathers_that_would_not_meet() -> None:
    """With nothing to train on the first stage for one kind of microbatch, that has fewer actions to gather for."""

    class Detached(Forks):
        def forward(self, x: Tensor, which: str) -> Tensor:
            for number, layer in enumerate(self.layers):
                x = torch.tanh(layer(x))
                if number == 1 and which == "b":
                    x = x.detach()
            return x

    model = Detached()
    lines = [[batch("a", 3)], [batch("b", 4)]]

    def squared(output: Tensor, _: Any) -> gc.TokenLoss:
        return gc.TokenLoss(output.square().sum(), output.shape[0])

    plan = gc.Plan(split=["layers.2"], backend="eager", parameters="shard", regather=True, quiet=True)
    step = VirtualStep(model, squared, plan=plan, data_ranks=2)
    with pytest.raises(AgreementError) as caught:
        step.run(lines)
    assert "expected: stage 0, B: gathers its parameters (rank 0)" in str(caught.value)
    again = step.run([lines[1], lines[1]])
    assert again.gradients.get("layers.0.weight") is None
    once = VirtualStep(model, squared, plan=gc.Plan(split=["layers.2"], backend="eager", quiet=True), data_ranks=2)
    expected = reference(model, squared, [lines[0][0], lines[1][0]])
    for key, gradient in once.run(lines).gradients.items():
        equal(gradient, expected.gradients[key], key)
