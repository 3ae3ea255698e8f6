"""Large fp32 products on CPU are computed by oneDNN inside Inductor; everything else stays as it was."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from graphcomp.compat import onednn
from graphcomp.compat.inductor import compile_graph
from graphcomp.compat.onednn import LINEAR, use_onednn

needs_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch without oneDNN")


@pytest.fixture(autouse=True)
def not_made_by_intel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onednn, "_made_by_intel", lambda: False)


def step(x: Tensor, weight: Tensor, bias: Tensor, gradient: Tensor) -> tuple[Tensor, ...]:
    """A linear layer forward and backward, with every form of operand: dense and transposed."""
    out = torch.addmm(bias, x, weight.t())
    return out, gradient @ weight, gradient.t() @ x, (out.relu() @ weight).sum(1)


def operands(rows: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    draw = torch.Generator().manual_seed(rows)
    shapes = [(rows, 192), (160, 192), (160,), (rows, 160)]
    return [torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype) for shape in shapes]


def traced(function: Callable[..., object], inputs: list[Tensor], mode: str = "symbolic") -> GraphModule:
    return make_fx(function, tracing_mode=mode)(*inputs)


@needs_onednn
def test_large_products_and_no_others_are_taken() -> None:
    module = traced(step, operands(96))
    assert use_onednn(module.graph) == 4
    module.recompile()
    assert [node.target for node in module.graph.nodes].count(LINEAR) == 4
    for rows in (96, 7):
        for found, expected in zip(module(*operands(rows)), step(*operands(rows, torch.float64)), strict=True):
            torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_stay(dtype: torch.dtype) -> None:
    assert use_onednn(traced(step, operands(96, dtype)).graph) == 0


def test_small_products_stay() -> None:
    def small(x: Tensor, weight: Tensor) -> Tensor:
        return x @ weight

    assert use_onednn(traced(small, [torch.ones(64, 16), torch.ones(16, 32)]).graph) == 0


@needs_onednn
@pytest.mark.parametrize(("columns", "taken"), [(32, 0), (160, 1)])
def test_a_transposed_left_operand_has_to_be_worth_its_copy(columns: int, taken: int) -> None:
    def gradient_of_weight(gradient: Tensor, x: Tensor) -> Tensor:
        return gradient.t() @ x

    inputs = [torch.ones(64, 4096), torch.ones(64, columns)]
    assert use_onednn(traced(gradient_of_weight, inputs, "fake").graph) == taken
    plain = [inputs[0].t().contiguous(), inputs[1]]
    assert use_onednn(traced(torch.matmul, plain, "fake").graph) == 1


def test_a_symbolic_size_is_taken_for_64_at_least() -> None:
    def product(x: Tensor, weight: Tensor) -> Tensor:
        return x @ weight

    inputs = [torch.ones(3, 192), torch.ones(192, 192)]
    assert use_onednn(traced(product, inputs, "fake").graph) == 0
    module = make_fx(product, tracing_mode="symbolic")(*inputs)
    assert use_onednn(module.graph) == int(onednn.pays())


@pytest.mark.parametrize(("name", "taken"), [("Intel Xeon", False), ("AMD EPYC", True), ("", True)])
@needs_onednn
@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="torch without MKL")
def test_mkl_is_left_alone_where_it_is_fast(name: str, taken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"cpu_name": name})
    assert bool(use_onednn(traced(step, operands(96)).graph)) is taken


OPERANDS = {
    "no rows": (torch.ones(0, 8), torch.ones(3, 8), torch.ones(3)),
    "no terms": (torch.ones(5, 0), torch.ones(3, 0), None),
    "no terms, a bias": (torch.ones(5, 0), torch.ones(3, 0), torch.arange(3.0)),
    "repeated rows": (torch.randn(5, 8), torch.randn(1, 8).expand(3, 8), None),
    "repeated columns": (torch.randn(5, 1).expand(5, 8), torch.randn(3, 1).expand(3, 8), None),
    "every other": (torch.randn(5, 16)[:, ::2], torch.randn(3, 16)[:, ::2], torch.randn(6)[::2]),
    "overlapping": (torch.randn(30).as_strided((5, 8), (2, 1)), torch.randn(30).as_strided((3, 8), (2, 1)), None),
    "transposed": (torch.randn(8, 5).t(), torch.randn(8, 3).t(), torch.randn(3)),
}


@pytest.mark.parametrize("name", OPERANDS)
def test_operands_of_any_form(name: str) -> None:
    x, weight, bias = OPERANDS[name]
    expected = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
    found = LINEAR(x, weight, bias)
    assert found.is_contiguous()
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


@needs_onednn
@pytest.mark.inductor
def test_inductor_compiles_it_for_every_size() -> None:
    module = traced(step, operands(96))
    inputs = [node.meta["val"] for node in module.graph.nodes if node.op == "placeholder"]
    module.graph.output_node().args = (list(module.graph.output_node().args[0]),)
    module.recompile()
    with torch.no_grad():
        call = compile_graph(module, inputs, inputs[0].fake_mode)
        for rows in (96, 7, 200, 0):
            found = call(operands(rows))
            for one, expected in zip(found, step(*operands(rows, torch.float64)), strict=True):
                torch.testing.assert_close(one.double(), expected, rtol=1e-4, atol=1e-4)
