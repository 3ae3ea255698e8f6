"""Inductor is asked for code that holds for all sizes; what it computes wrong by itself is corrected."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from graphcomp.compat import inductor as shim
from graphcomp.compat import undecided
from graphcomp.compat.inductor import CompiledCode, compile_graph, guards_since
from graphcomp.compat.symbolic_sizes import symbolic_bodies
from graphcomp.compat.symbols import FakeTensorMode, fake_batch_leaf, guard_count, new_fake_mode
from graphcomp.ir.interp import as_written

pytestmark = pytest.mark.inductor
aten = torch.ops.aten
END = 2**63 - 1
Function = Callable[[Tensor], Sequence[Tensor]]


def compiled(function: Function, rows: int = 6) -> tuple[CompiledCode, FakeTensorMode, int]:
    """The code, and how many guards there were before it was compiled. Both sizes are symbols."""
    mode = new_fake_mode()
    x = fake_batch_leaf(mode, torch.randn(rows, 4), "x")
    with mode, symbolic_bodies():
        module = make_fx(function, tracing_mode="real")(x)
    before = guard_count(mode)
    with as_written():
        return compile_graph(module, [x], mode), mode, before


def symbols_of(mode: FakeTensorMode) -> set[str]:
    return {str(symbol) for symbol in mode.shape_env.backed_var_to_val}  # type: ignore[union-attr]


def open_ends(x: Tensor) -> list[Tensor]:
    y = x.sin()
    return [
        y[1:] * y[:-1],
        y[1::3],
        y[-2:].cos(),
        y[-2:-1] + y[:1],
        y[2 * y.shape[0] :],
        torch.slice_scatter(y, y[2:] * 2, 0, 2),
        torch.slice_scatter(y, y[1::2] * 2, 0, 1, END, 2),
        aten.slice_backward.default(y[1::2].cos(), y.shape, 0, 1, END, 2),
        y.flatten()[3:],
        y[:, 1:] + y[:, :-1],
        F.pad(y, (0, 0, -1, 2)).roll(1, 0).flip(0)[1:],
        (y @ y.mT).diagonal(1) * 2,
        (y @ y.mT).tril(-1)[1:, 1:],
    ]


def test_slices_with_an_open_end_hold_for_all_sizes() -> None:
    code, mode, before = compiled(open_ends)
    added = guards_since(mode, before, symbols_of(mode))
    for rows in (5, 6, 100_000):
        assert all(relation.subs(dict.fromkeys(relation.free_symbols, rows)) for relation in added)
    for rows in (5, 6, 17):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(code([x]), open_ends(x))


@pytest.mark.parametrize(
    "take",
    [lambda x: [aten.slice_scatter.default(x, x[1:].sin(), 0, 1, END)], lambda x: [x.diagonal().sin()]],
    ids=["slice", "diagonal"],
)
def test_inductor_still_wants_to_know_the_smaller_size(take: Function, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.sizevars import SizeVarAllocator

    monkeypatch.setattr(undecided, "_smaller", SizeVarAllocator.evaluate_min)
    monkeypatch.setattr(undecided, "_larger", SizeVarAllocator.evaluate_max)
    with pytest.raises(Exception, match="evaluate_min"):
        compiled(take)


def shifted_and_pooled(x: Tensor) -> list[Tensor]:
    y = x.tanh()
    shifted = y.index_put((torch.arange(x.shape[0])[1:],), y[:-1])
    images = x.view(1, 1, *x.shape)
    whole = (images, [2, 3], [2, 3], [0, 0], True, True, None)
    pooled = aten.avg_pool2d.default(*whole)
    deep = (images.unsqueeze(0), [1, 2, 3], [1, 2, 3], [0, 0, 0], True, True, None)
    return [
        shifted,
        aten.avg_pool2d_backward.default(pooled, *whole),
        aten.avg_pool3d_backward.default(aten.avg_pool3d.default(*deep), *deep),
    ]


@pytest.mark.parametrize("corrected", [True, False], ids=["corrected", "as_it_is"])
def test_what_inductor_computes_wrong(corrected: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each place is wrong without the correction."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # both have the same key
    if not corrected:
        monkeypatch.setattr(shim, "corrected", contextlib.nullcontext)
    x = torch.randn(7, 5)
    pairs = zip(compiled(shifted_and_pooled)[0]([x]), shifted_and_pooled(x), strict=True)
    assert [torch.allclose(got, wanted) for got, wanted in pairs] == [corrected] * 3


def test_code_that_is_found_on_disk_comes_with_its_conditions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from torch._dynamo.utils import counters

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))

    def conditions(rows: int) -> set[str]:
        _, mode, before = compiled(lambda x: [F.adaptive_avg_pool2d(x[None].sin(), 3)], rows)
        return {str(relation) for relation in guards_since(mode, before, symbols_of(mode))}

    made = conditions(6)
    assert made
    hits = counters["inductor"]["fxgraph_cache_hit"]
    assert conditions(6) == made
    assert counters["inductor"]["fxgraph_cache_hit"] == hits + 1
    assert conditions(9) != made
    assert counters["inductor"]["fxgraph_cache_hit"] == hits + 1
