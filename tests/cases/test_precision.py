"""Precision: what eager computes in which dtype, a step computes in it too, bit for bit without a compiler."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphcomp import Plan, compile_train_step, testing
from graphcomp.testing import VirtualStep
from tests.cases.tiny import divided, next_token, rows, step_of, tiny_gpt
from tests.zoo.reference import reference


class Mixed(nn.Module):
    """run: what forward does with the layers."""

    def __init__(self, run: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.norm, self.b = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def square(output: Tensor, batch: Any) -> Tensor:
    return output.float().square().mean()


def half_way(m: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        h = m.b(m.norm(m.a(x)).relu())
    return torch.tanh(h.float())


def switched_off_inside(m: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        h = m.a(x)
        with torch.autocast("cpu", enabled=False):
            h = m.norm(h.float())
        return m.b(h)


def plain(m: Any, x: Tensor) -> Tensor:
    return m.b(m.norm(m.a(x)).relu())


def norm_in_single(m: Any, x: Tensor) -> Tensor:
    return m.b(m.norm(m.a(x.bfloat16()).float()).bfloat16())


def bitwise(model: nn.Module, given: list[Any], stages: int) -> VirtualStep:
    """One step equals eager bit by bit: loss, gradients and their dtypes."""
    expected = reference(model, square, given)
    step = step_of(model, square, stages)
    ran = step.run(given)
    for name, gradient in expected.gradients.items():
        assert ran.gradients[name].dtype == gradient.dtype and torch.equal(ran.gradients[name], gradient), name
    return step


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("run", [half_way, switched_off_inside])
def test_autocast_in_forward(run: Callable[[Any, Tensor], Tensor], stages: int) -> None:
    bitwise(Mixed(run), [torch.randn(n, 8) for n in (3, 5)], stages)


def test_autocast_around_the_step_is_followed() -> None:
    model, given = Mixed(plain), [torch.randn(n, 8) for n in (3, 5)]
    step = step_of(model, square, 2)
    found = []
    for context in (contextlib.nullcontext(), torch.autocast("cpu", dtype=torch.bfloat16), contextlib.nullcontext()):
        with context:
            expected, ran = reference(model, square, given), step.run(given)
        assert all(torch.equal(ran.gradients[name], gradient) for name, gradient in expected.gradients.items())
        found.append(ran.gradients["a.weight"])
    assert not torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    assert step.compiler.traces == 2


@pytest.mark.parametrize("stages", [1, 2])
def test_half_precision_with_norms_in_single(stages: int) -> None:
    model = Mixed(norm_in_single)
    model.a.bfloat16()
    model.b.bfloat16()
    step = bitwise(model, [torch.randn(n, 8) for n in (3, 5)], stages)
    cut = step.latest[0].specialisation.partitions[False]
    # What is bfloat16 in the model crosses so, either way.
    crossing = [*cut.forward_boundaries.values(), *cut.backward_boundaries.values()]
    assert {value.dtype for boundary in crossing for value in boundary.values} <= {torch.bfloat16, torch.float32}


def test_values_cross_in_the_dtype_they_have() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).bfloat16()
    step = step_of(model, square, split=["1"])
    step.run([torch.randn(3, 8).bfloat16()])
    cut = step.latest[0].specialisation.partitions[False]
    crossing = [*cut.forward_boundaries.values(), *cut.backward_boundaries.values()]
    assert [value.dtype for boundary in crossing for value in boundary.values] == [torch.bfloat16, torch.bfloat16]


def test_sums_of_many_small_gradients_keep_their_digits() -> None:
    """256 + 1 + 1 + ... in bfloat16 stays 256."""
    given = [torch.full((1, 1), value, dtype=torch.bfloat16) for value in (256.0, *[1.0] * 8)]

    def total(output: Tensor, batch: Any) -> Any:
        return output.float().sum() * len(given)  # undoes the mean over microbatches

    for dtype, expected in ((None, 256.0), (torch.float32, 264.0)):
        model = nn.Linear(1, 1, bias=False).bfloat16()
        step = compile_train_step(model, total, plan=Plan(backend="eager", quiet=True, accumulate_dtype=dtype))
        step(given)
        assert model.weight.grad.dtype is torch.bfloat16
        assert model.weight.grad.item() == expected


def train(model: nn.Module, optimizer: torch.optim.Optimizer, given: list[Any], step: Callable[[], Any]) -> None:
    for _ in range(3):
        optimizer.zero_grad()
        step()
        optimizer.step()


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_three_steps_of_adamw_are_bitwise_eager(dtype: torch.dtype, stages: int) -> None:
    model = tiny_gpt().to(dtype)
    eager = copy.deepcopy(model)
    given = divided(rows(4), 2)
    step = step_of(model, next_token, stages)
    ours, theirs = (torch.optim.AdamW(one.parameters(), lr=0.01) for one in (model, eager))

    def run() -> None:
        found = step.run(given).gradients
        for name, parameter in model.named_parameters():
            parameter.grad = found[name]

    def plainly() -> None:
        for name, gradient in reference(eager, next_token, given).gradients.items():
            eager.get_parameter(name).grad = gradient

    train(model, ours, given, run)
    train(eager, theirs, given, plainly)
    for (name, one), other in zip(model.named_parameters(), eager.parameters(), strict=True):
        assert torch.equal(one, other), name


def test_gradient_scaling() -> None:
    """The scaler never sees the loss: the step is given its scale, and the scaler finds scaled gradients."""
    model, eager = Mixed(plain), Mixed(plain)
    given = [torch.randn(3, 8), torch.randn(5, 8)]
    scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2) for _ in range(2)]
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, eager)]
    step = compile_train_step(model, square, plan=Plan(backend="eager", quiet=True))

    def update(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, one: nn.Module) -> None:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(one.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()

    for number in range(5):
        if number == 3:  # an infinite gradient: both skip the update, and lower the scale
            given = [torch.full((3, 8), float("inf"))]
        if number == 4:
            given = [torch.randn(3, 8)]
        for optimizer in optimizers:
            optimizer.zero_grad()
        scalers[0].scale(torch.ones(()))  # the scaler makes its scale at the first use
        step(given, loss_scale=scalers[0].get_scale())
        for batch in given:
            scalers[1].scale(square(eager(batch), batch) / len(given)).backward()
        for scaler, optimizer, one in zip(scalers, optimizers, (model, eager), strict=True):
            update(scaler, optimizer, one)
        assert scalers[0].get_scale() == scalers[1].get_scale()
        for one, other in zip(model.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(one, other)
    assert scalers[0].get_scale() == 1024.0


def test_check_parity_follows_autocast() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        testing.check_parity(Mixed(plain), square, [torch.randn(3, 8)], plan=Plan(backend="eager", quiet=True))
