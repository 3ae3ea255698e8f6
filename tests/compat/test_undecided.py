"""Inductor is asked for code that holds for all sizes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from graphcomp.compat import undecided
from graphcomp.compat.inductor import guards_since
from tests.compat.compiling import Function, compiled, symbols_of

pytestmark = pytest.mark.inductor
aten = torch.ops.aten
END = 2**63 - 1


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
