"""Sums are written to where they are kept, products by the matrix library."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
from expecttest import TestCase
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from graphcomp.compat.inductor import compile_graph
from graphcomp.compat.sums import write_sums

aten = torch.ops.aten
Sum = Callable[[Tensor, Tensor, Tensor], Tensor]


def written(function: Sum, kept: Tensor, a: Tensor, b: Tensor) -> GraphModule:
    """The graph of a sum with `kept` as a term, written to it."""
    module = make_fx(lambda *given: [function(*given)], tracing_mode="fake")(kept, a, b)
    write_sums(module.graph, [(0, 0)])
    module.graph.lint()
    module.recompile()
    return module


def operands(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    return tuple(torch.randn(4, 4, generator=draw, dtype=torch.float64).to(dtype) for _ in range(3))  # type: ignore[return-value]


def rows(kept: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return aten.index_put(kept + a @ b, [torch.tensor([1, 1, 3])], a[:3], True)


SUMS: dict[str, tuple[Sum, int]] = {
    "a product": (lambda kept, a, b: kept + a @ b, 1),
    "of transposed factors": (lambda kept, a, b: kept + a.t() @ b, 1),
    "two products": (lambda kept, a, b: kept + (a @ b + b @ a), 2),
    "a product and others": (lambda kept, a, b: kept + (a.sin() + (a @ b + b.cos())), 1),
    "a product twice": (lambda kept, a, b: (lambda g: kept + (g + g))(a @ b), 0),
    "a product that serves more": (lambda kept, a, b: (lambda g: kept + (g + g.sin()))(a @ b), 0),
    "a product of another form": (lambda kept, a, b: kept + a[:1] @ b, 0),
    "no product": (lambda kept, a, b: kept + a.sin(), 0),
    "what is kept, twice": (lambda kept, a, b: kept + (kept + a @ b), 0),
    "a part of it": (lambda kept, a, b: aten.add.Tensor(kept, a @ b, alpha=2), 0),
    "rows added to a product": (rows, 1),
}


@pytest.mark.parametrize("name", SUMS)
def test_the_sum_stands_where_it_is_kept(name: str) -> None:
    function, products = SUMS[name]
    kept, a, b = operands()
    expected = function(kept, a, b)
    module = written(function, kept, a, b)
    targets = [node.target for node in module.graph.nodes]
    assert targets.count(aten.addmm_.default) == products
    assert list(module(kept, a, b)) == [None]
    torch.testing.assert_close(kept, expected, rtol=1e-14, atol=1e-14)


def test_a_narrower_product_is_not_added_by_the_library() -> None:
    kept, a, b = operands()
    a, b = a.float(), b.float()
    expected = kept + a @ b
    module = written(lambda kept, a, b: kept + a @ b, kept, a, b)
    assert aten.addmm_.default not in [node.target for node in module.graph.nodes]
    module(kept, a, b)
    torch.testing.assert_close(kept, expected, rtol=0, atol=0)


@pytest.mark.inductor
@pytest.mark.parametrize("options", [{}, {"cpp_wrapper": True}], ids=["Python", "C++"])
def test_inductor_takes_it_where_ci_is_set(
    options: dict[str, bool], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CI", "true")
    log = logging.getLogger("torch._inductor.ir")
    monkeypatch.setattr(log, "handlers", [caplog.handler])
    kept, a, b = operands()
    expected = kept + a @ b
    module = make_fx(lambda kept, a, b: [kept + a @ b], tracing_mode="symbolic")(kept, a, b)
    inputs = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
    with torch.no_grad():
        anew = {"fx_graph_cache": False, **options}
        compiled = compile_graph(module, inputs, inputs[0].fake_mode, [(0, 0)], anew)
        assert list(compiled([kept, a, b])) == [None]
    assert not [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    torch.testing.assert_close(kept, expected, rtol=1e-14, atol=1e-14)
    log.warning("%s, as code of somebody else calls it", aten.addmm_.default)
    assert "as code of somebody else calls it" in caplog.text


class TestText(TestCase):
    def test_each_write_stands_behind_its_product(self) -> None:
        module = written(lambda kept, a, b: kept + (a @ b + (b @ a + a.sin())), *operands())
        self.assertExpectedInline(
            module.code.strip(),
            """\
def forward(self, arg0_1, arg1_1, arg2_1):
    addmm__default = torch.ops.aten.addmm_.default(arg0_1, arg1_1, arg2_1);  addmm__default = None
    addmm__default_1 = torch.ops.aten.addmm_.default(arg0_1, arg2_1, arg1_1);  arg2_1 = addmm__default_1 = None
    sin = torch.ops.aten.sin.default(arg1_1);  arg1_1 = None
    add_default = torch.ops.prims.add.default(arg0_1, sin);  sin = None
    copy__default = torch.ops.aten.copy_.default(arg0_1, add_default);  arg0_1 = add_default = copy__default = None
    return (None,)""",
        )
