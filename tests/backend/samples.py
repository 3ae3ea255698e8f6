"""Programs for the backends, written by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from graphcomp.ir.program import Level, Program
from graphcomp.ir.signature import Activation, Grad, Loss, Param, Saved
from tests.ir.build import Builder

aten = torch.ops.aten
ROWS = (2, 3, 7, 64, 65)


def forward(name: str = "stage 1 forward", parameter: str = "fc.weight", rows: int = 6) -> Program:
    """y = gelu(x @ w), with x and x @ w saved, the latter transposed; symbolic in rows."""
    b = Builder(example=(rows, 16))
    count, _ = b.sizes
    w = b.input(Param(parameter), (16, 16), "w")
    with b.mode:
        activation = torch.empty(count, 16)
    x = b.input(Activation(0, 1, 0), activation, "x")
    mm = b.call(aten.mm.default, x, w)
    y = b.call(aten.gelu.default, mm)
    transposed = b.call(aten.t.default, mm)
    outputs = {Activation(1, 2, 0): y, Saved(0): x, Saved(1): transposed, Saved(2): None}
    return b.program(outputs, name, Level.STAGE)


def forward_inputs(rows: int) -> list[Any]:
    generator = torch.Generator().manual_seed(rows)
    return [
        torch.randn(16, 16, generator=generator).requires_grad_(),
        torch.randn(rows, 16, generator=generator),
    ]


def with_size(rows: int = 6, columns: int = 5) -> Program:
    """The mean over both symbolic dimensions, whose sizes are inputs, and a gradient."""
    b = Builder(example=(rows, columns))
    x = b.input(Activation(0, 1, 0), b.leaf, "x")
    first, second = b.size(0), b.size(1)
    w = b.input(Param("scale"), (), "w")
    count = b.call(torch.ops.aten.mul.Scalar, w, 1.0)
    flat = b.call(aten.reshape.default, x, [-1])
    total = b.call(aten.sum.default, flat)
    scaled = b.call(aten.mul.Tensor, total, count)
    shifted = b.call(aten.add.Tensor, scaled, first)
    shifted = b.call(aten.sub.Tensor, shifted, second)
    grad = b.call(aten.expand.default, total, [first, second])
    return b.program({Loss("loss"): shifted, Grad("scale"): total, Saved(0): grad}, "both sizes", Level.STAGE)


def nothing() -> Program:
    """Only hands its input on."""
    b = Builder(example=(6, 16))
    x = b.input(Activation(0, 1, 0), b.leaf, "x")
    return b.program({Activation(1, 2, 0): x}, "relay", Level.STAGE)


def equal(got: Sequence[Any], wanted: Sequence[Any], exactly: bool) -> None:
    assert len(got) == len(wanted)
    for mine, theirs in zip(got, wanted, strict=True):
        if theirs is None:
            assert mine is None
            continue
        assert mine.shape == theirs.shape
        assert mine.stride() == theirs.stride()
        if exactly:
            assert torch.equal(mine, theirs)
        else:
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
