"""Functions that read sizes as plain numbers: frozen, or refused, without the shim; symbolic with it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from graphcomp.compat.symbolic_sizes import SymbolicSizes, sizes_in_text, whole_numbers
from graphcomp.compat.symbols import expression, fake_batch_leaf, new_fake_mode

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "pad": lambda x: F.pad(x, (0, 0, 0, 1)),
    "interpolate": lambda x: F.interpolate(x, scale_factor=2),
    "unfold": lambda x: F.unfold(x[:, None], (2, 2)),
    "trace": lambda x: torch.trace(x[:, :6, 0] @ x[:, :6, 0].mT),
    "diag": lambda x: (x[..., 0] @ x[..., 1].mT).diag(1),
    "pinv": lambda x: torch.linalg.pinv(x @ x.mT + torch.eye(x.shape[1])),
    "fft": lambda x: torch.fft.rfft(x, n=16, dim=1).abs(),
    "bilinear": lambda x: F.bilinear(x, x, torch.ones(3, 6, 6)),
}


def trace(function: Callable[[Tensor], Tensor], grad: bool, shim: bool) -> tuple[GraphModule, list[object]]:
    """The graph of the function (and of its gradient), and what became of the sizes of dimensions 0 and 1."""
    mode = new_fake_mode()
    fake = fake_batch_leaf(mode, torch.randn(4, 9, 6), "x").requires_grad_(grad)

    def both(x: Tensor) -> Tensor:
        result = function(x)
        return torch.autograd.grad(result.square().sum(), x)[0] if grad else result

    with mode, SymbolicSizes({}) if shim else contextlib.nullcontext():
        graph = make_fx(both, tracing_mode="real", _allow_non_fake_inputs=True)(fake)
    return graph, [expression(mode, size) for size in fake.shape[:2]]


@pytest.mark.parametrize("grad", [False, True], ids=["forward", "with_backward"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_one_trace_serves_other_sizes(name: str, grad: bool) -> None:
    graph, sizes = trace(FUNCTIONS[name], grad, shim=True)
    assert not any(isinstance(size, int) for size in sizes)
    x = torch.randn(3, 7, 6, requires_grad=grad)
    expected = FUNCTIONS[name](x)
    if grad:
        expected = torch.autograd.grad(expected.square().sum(), x)[0]
    assert torch.equal(graph(x.detach()), expected)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_shim_is_still_needed(name: str) -> None:
    try:
        _, sizes = trace(FUNCTIONS[name], grad=True, shim=False)
    except RuntimeError:
        return
    assert any(isinstance(size, int) for size in sizes)


def test_a_text_of_a_size_is_of_a_number_and_adds_its_guard() -> None:
    mode = new_fake_mode()
    before = torch.SymInt.__repr__
    fake = fake_batch_leaf(mode, torch.randn(4, 9), "x")
    assert f"{fake.shape[0]}" != "4"  # the shim is needed: else the name of a symbol
    with sizes_in_text(lambda file: file == __file__):
        assert f"{fake.shape[0]}" == "4" and f"{fake.shape[0] / 8:.2f}" == "0.50" and str(fake.shape[0] > 2) == "True"
        assert isinstance(expression(mode, fake.shape[0]), int)
    with sizes_in_text(lambda file: False):
        assert f"{fake.shape[1]}" == before(fake.shape[1]) != "9"
    assert torch.SymInt.__repr__ is before and "__format__" not in vars(torch.SymInt)
    assert not isinstance(expression(mode, fake.shape[1]), int)


def test_sizes_can_do_what_numbers_can() -> None:
    mode = new_fake_mode()
    size = fake_batch_leaf(mode, torch.randn(9), "x").shape[0]
    with pytest.raises(TypeError):
        divmod(size, 4)
    with whole_numbers():
        assert (*divmod(size, 4), *divmod(20, size), ~size) == (2, 1, 2, 2, -10)
    with pytest.raises(TypeError):
        divmod(size, 4)


def test_a_size_that_has_turned_out_to_be_a_number() -> None:
    """The tracer has not seen it being computed, and does not know what to take for it."""
    mode = new_fake_mode()
    fake = fake_batch_leaf(mode, torch.randn(9), "x")
    four = fake.shape[0] - fake.shape[0] + 4

    def function(x: Tensor) -> Tensor:
        return x.sum() + torch.ones(x.shape[0] * four)

    for shim in (False, True):
        refused = contextlib.nullcontext() if shim else pytest.raises(RuntimeError, match="not tracked with proxy")
        with mode, refused, whole_numbers() if shim else contextlib.nullcontext():
            graph = make_fx(function, tracing_mode="real", _allow_non_fake_inputs=True)(fake)
    assert graph(torch.ones(3)).shape == (12,)
