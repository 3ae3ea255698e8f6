"""Computes head and loss, forward and backward, for some of the rows at a time."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import ClassVar

import sympy
import torch

from graphcomp.compat.symbols import expression
from graphcomp.errors import PlanError
from graphcomp.ir import meta
from graphcomp.ir.program import Level, Program
from graphcomp.passes.base import Pass
from graphcomp.passes.row_parts import Parts
from graphcomp.passes.row_region import Region, find_head
from graphcomp.passes.symbols import with_all_sizes


@dataclass(frozen=True)
class ChunkLoss(Pass):
    """Repeats the head's matrix product, the loss behind it and their backward once for each of `chunks` parts of the
    rows, so that the logits of one part exist at a time.

    Level: joint. To be run without outputs that nobody asked for: the logits must not be needed as a whole. repeat: the
    backward computes a part's logits again, for a schedule that runs forward and backward apart.

    The region: all that is computed from the product of the model with the most columns that feeds no other product.
    Its operations treat rows one by one (`passes.rows`), up to sums over all rows (losses, counts, gradients of weight
    and bias) and, in the backward, the gradient of the product's input. Where a loss takes a slice of the rows (labels
    that are shifted), the input is sliced instead of the logits; left out rows had a gradient of zero.

    Sound because each row's result stays what it was; sums over rows are sums of sums, rounded differently. What the
    backward begins with (scale / denominator) is an input. Refused by name: an operation that mixes rows, or needs the
    logits of all rows.

        before: %mm = mm(%h, %w)    %total = sum(loss(%mm))    %d = dloss(%mm)    %dh = mm(%d, %wt)    # chunks=2
        after:  %h0 = slice(%h, 0, 0, n // 2)    %mm = mm(%h0, %w)    %t0 = sum(loss(%mm))    %dh0 = mm(dloss(%mm), %wt)
                %h1 = slice(%h, 0, n // 2, n)    ...                  %total = add(%t0, %t1)    %dh = cat([%dh0, %dh1])
    """

    chunks: int
    repeat: bool = False
    name: ClassVar[str] = "chunk_loss"
    levels: ClassVar[frozenset[Level]] = frozenset({Level.JOINT})

    def __post_init__(self) -> None:
        if isinstance(self.chunks, bool) or not isinstance(self.chunks, int) or self.chunks < 1:
            what = "pass 'chunk_loss' takes the number of chunks"
            raise PlanError(what, expected="a whole number from 1", got=repr(self.chunks))

    def apply(self, program: Program) -> Program:
        if self.chunks == 1:
            return program
        program = with_all_sizes(program)
        head = find_head(program)
        if expression(program.fake_mode, meta.value(head).shape[0]) == 1:  # type: ignore[attr-defined]
            return program
        region = Region(program, head)
        with program.fake_mode, program.fake_mode.shape_env.suppress_guards():
            Parts(program, region, self.chunks, self.repeat).run()
        return program


def rows_of_loss(program: Program) -> tuple[sympy.Expr | int, int | None]:
    """How many rows the pass would deal out, and how many in the example, if that is known. Raises CaptureError as the
    pass does."""
    rows = prod(Region(program, find_head(program)).rows)
    return expression(program.fake_mode, rows), rows.node.hint if isinstance(rows, torch.SymInt) else rows
