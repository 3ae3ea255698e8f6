"""Parameters that are made of others, adapters, modules that run several times, and custom autograd functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from graphcomp import Plan, compile_train_step
from tests.cases.tiny import assert_equal, step_of


class Chain(nn.Module):
    """code: what is done with the hidden values."""

    def __init__(self, code: Callable[[Any, Tensor], Tensor] = lambda m, h: m.b(h)) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = (nn.Linear(6, 6) for _ in range(3))
        self.code = code

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.code(self, self.a(x).relu()))


def square(output: Tensor, batch: Any) -> Tensor:
    return output.square().mean()


def compare(model: nn.Module, stages: int) -> None:
    """In float64, against eager, twice: buffers such as those of a spectral norm move on."""
    model = model.double()
    with torch.no_grad():
        model(torch.randn(1, 6, dtype=torch.float64))  # or an older norm of weights could not be copied
    step = step_of(model, square, stages)
    for _ in range(2):
        assert_equal(model, square, [torch.randn(n, 6, dtype=torch.float64) for n in (3, 5)], step, tolerance=1e-12)


class Symmetric(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).T


PARAMETRIZED: list[Callable[[nn.Module], Any]] = [
    lambda layer: parametrize.register_parametrization(layer, "weight", Symmetric()),
    parametrizations.weight_norm,
    parametrizations.spectral_norm,
    parametrizations.orthogonal,
    torch.nn.utils.weight_norm,
    torch.nn.utils.spectral_norm,
]


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("change", PARAMETRIZED)
def test_parameters_made_of_others(change: Callable[[nn.Module], Any], stages: int) -> None:
    model = Chain()
    change(model.b)
    names = list(model.state_dict())
    compare(model, stages)
    assert list(model.state_dict()) == names
    with torch.no_grad():
        model(torch.randn(2, 6, dtype=torch.float64))  # which is still an eager model


class Adapted(nn.Module):
    """A frozen layer with an adapter of rank 2."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(6, 6).requires_grad_(False)
        self.down, self.up = nn.Parameter(torch.randn(2, 6)), nn.Parameter(torch.randn(6, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.down.T @ self.up.T


@pytest.mark.parametrize("stages", [1, 2])
def test_adapters_and_unfreezing(stages: int) -> None:
    model = Chain().requires_grad_(False)
    model.a, model.b = Adapted(), Adapted()
    model = model.double()
    step = step_of(model, square, stages)
    for number in range(2):
        given = [torch.randn(n, 6, dtype=torch.float64) for n in (3, 5)]
        ran, _ = assert_equal(model, square, given, step, tolerance=1e-12)
        trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        assert ran.gradients.keys() == trained and len(trained) == (4 if number == 0 else 6)
        assert step.compiler.traces == number + 1
        model.a.base.requires_grad_(True)


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_a_module_that_runs_several_times(stages: int) -> None:
    compare(Chain(lambda m, h: m.b(m.a(m.b(m.b(h))))), stages)


class Seven(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return torch.full_like(gradient, 7)


class Saves(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, factor: float, name: str | None = None) -> Tensor:
        ctx.save_for_backward(x, y)
        ctx.factor = factor
        return x * y * factor

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, y = ctx.saved_tensors
        needed = gradient * y * ctx.factor * 3 if ctx.needs_input_grad[0] else None
        return needed, gradient * x, None, None


class Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * x.cos() * 2


class SetUp(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, factor: int) -> tuple[Tensor, Tensor]:
        return x * factor, x.sign()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.factor = inputs[1]
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> Any:
        return gradient * ctx.factor * 5, None


class InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 11


def with_sign(m: Any, h: Tensor) -> Tensor:
    value, sign = SetUp.apply(m.b(h), 3)
    return value * sign


FUNCTIONS: list[Callable[[Any, Tensor], Tensor]] = [
    lambda m, h: Seven.apply(m.b(h)),
    lambda m, h: Saves.apply(m.b(h), h, 2.5, "name"),
    lambda m, h: Once.apply(m.b(h)),
    with_sign,
    lambda m, h: InPlace.apply(m.b(h)),
]


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("code", FUNCTIONS, ids=["constant", "saves", "once", "set up", "in place"])
def test_custom_functions(code: Callable[[Any, Tensor], Tensor], stages: int) -> None:
    compare(Chain(code), stages)


def test_a_backward_that_is_the_constant_seven() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            return Seven.apply(self.weight) * x

    model = Model()
    compile_train_step(model, lambda output, x: output.sum(), plan=Plan(backend="eager", quiet=True))(
        [torch.ones(1, 3)]
    )
    assert model.weight.grad.tolist() == [7.0, 7.0, 7.0]
