"""What code assigns without an operation is refused at its line: the program would go on with the old value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphcomp as gc
from graphcomp.capture import capture
from graphcomp.errors import CaptureError, GraphcompError, StateError
from graphcomp.testing import run_virtual


class Code(nn.Module):
    def __init__(self, code: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("old", torch.zeros(6))
        self.code = code

    def forward(self, x: Tensor) -> Tensor:
        return self.code(self, x)


def data_of_parameter(model: Any, x: Tensor) -> Tensor:
    model.linear.weight.data = model.linear.weight.data.clamp(-0.1, 0.1)
    return model.linear(x)


def data_of_buffer(model: Any, x: Tensor) -> Tensor:
    model.mean.data = x.mean(0)
    return model.linear(x) - model.mean


def data_of_local(model: Any, x: Tensor) -> Tensor:
    other = x.clone()
    other.data = x * 2
    return model.linear(other)


def swapped(model: Any, x: Tensor) -> Tensor:
    torch.utils.swap_tensors(model.mean, x.mean(0))
    return model.linear(x) - model.mean


def gradient(model: Any, x: Tensor) -> Tensor:
    model.linear.weight.grad = torch.ones(6, 6)
    return model.linear(x)


def other_parameter(model: Any, x: Tensor) -> Tensor:
    model.linear.weight = nn.Parameter(model.linear.weight / 2)
    return model.linear(x)


def no_parameter(model: Any, x: Tensor) -> Tensor:
    model.linear.bias = None
    return model.linear(x)


def new_parameter(model: Any, x: Tensor) -> Tensor:
    model.gain = nn.Parameter(torch.ones(6))
    return model.linear(x) * model.gain


def new_buffer(model: Any, x: Tensor) -> Tensor:
    model.register_buffer("first", x.mean(0))
    return model.linear(x) - model.first


def new_module(model: Any, x: Tensor) -> Tensor:
    model.other = nn.Linear(6, 6)
    return model.other(model.linear(x))


def other_module(model: Any, x: Tensor) -> Tensor:
    model.linear = nn.Linear(6, 6)
    return model.linear(x)


def trained_buffer(model: Any, x: Tensor) -> Tensor:
    h = model.linear(x)
    model.mean.mul_(0.5).add_(h.mean(0))
    return h - model.mean


USE = "what to do: compute with the new value itself"


@pytest.mark.parametrize(
    ("code", "kind", "says", "do"),
    [
        (data_of_parameter, CaptureError, "the code assigns to x.data", USE),
        (data_of_buffer, CaptureError, "the code assigns to x.data", USE),
        (data_of_local, CaptureError, "the code assigns to x.data", USE),
        (swapped, CaptureError, "the code swaps two tensors", USE),
        (gradient, CaptureError, "the code assigns to the gradient of a parameter", "what to do: return a loss"),
        (other_parameter, StateError, "replaces the parameter 'linear.weight'", "F.linear(x, w)"),
        (no_parameter, StateError, "removes the parameter 'linear.bias'", "F.linear(x, w)"),
        (new_parameter, StateError, "registers the parameter 'gain'", "register it in __init__"),
        (new_buffer, StateError, "registers the buffer 'first'", "register it in __init__"),
        (new_module, StateError, "registers the module 'other'", "register it in __init__"),
        (other_module, StateError, "replaces the module 'linear'", "register it in __init__"),
        (trained_buffer, StateError, "buffer 'mean' requires a gradient", "torch.no_grad()"),
    ],
)
def test_what_no_operation_stands_for(
    code: Callable[[Any, Tensor], Tensor], kind: type[GraphcompError], says: str, do: str
) -> None:
    model = Code(code)
    before = {name: (value, value.clone()) for name, value in model.state_dict(keep_vars=True).items()}
    with pytest.raises(GraphcompError) as error:
        capture(model, lambda y, x: gc.mean_loss(y.square().mean()), torch.randn(3, 6))
    assert type(error.value) is kind
    assert says in str(error.value) and do in str(error.value)
    line = code.__code__.co_firstlineno + (2 if code is data_of_local else 1)
    known_at_the_end = code in (trained_buffer, no_parameter)
    assert ("where: Code" if known_at_the_end else f"test_assigned.py:{line}") in str(error.value)
    after = model.state_dict(keep_vars=True)
    assert list(after) == list(before)
    assert all(after[name] is value and torch.equal(value, old) for name, (value, old) in before.items())


def written_in_place(model: Any, x: Tensor) -> Tensor:
    h = model.linear(x)
    model.mean.data.copy_(h.detach().mean(0))
    return h - model.mean


def one_tensor_twice(model: Any, x: Tensor) -> Tensor:
    h = model.linear(x)
    model.mean = model.mean + h.detach().mean(0)
    model.old = model.mean
    return h - model.old


def modules_of_its_own(model: Any, x: Tensor) -> Tensor:
    other = nn.Linear(6, 6, bias=False)
    with torch.no_grad():
        other.weight.copy_(torch.eye(6))
    model.linear = model.linear
    return other(model.linear(x))


@pytest.mark.parametrize("code", [written_in_place, one_tensor_twice, modules_of_its_own])
def test_what_a_program_does_as_eager_code(code: Callable[[Any, Tensor], Tensor]) -> None:
    def loss_fn(y: Tensor, x: Tensor) -> gc.MeanLoss:
        return gc.mean_loss(y.square().mean())

    torch.manual_seed(0)
    compiled, eager = Code(code), Code(code)
    eager.load_state_dict(compiled.state_dict())
    batches = [torch.randn(3, 6), torch.randn(4, 6)]
    result, gradients = run_virtual(compiled, loss_fn, batches, plan=gc.Plan(backend="eager", quiet=True))
    expected = torch.stack([loss_fn(eager(x), x).value for x in batches]).mean()
    expected.backward()
    torch.testing.assert_close(result.loss.float(), expected.detach())
    torch.testing.assert_close(gradients["linear.weight"], eager.linear.weight.grad)
    for name in ("mean", "old"):
        torch.testing.assert_close(compiled.get_buffer(name), eager.get_buffer(name))
