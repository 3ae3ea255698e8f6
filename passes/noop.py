"""Removes operations that give back what they were given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import Node

from graphcomp.compat.symbols import FakeTensorMode
from graphcomp.ir import meta
from graphcomp.ir.program import Program
from graphcomp.passes.base import Pass
from graphcomp.passes.driver import rewrite_nodes
from graphcomp.passes.memory import base_of, geometry, is_dense, is_exposed, place

aten = torch.ops.aten
COPIES = {aten.clone.default: 0, aten._to_copy.default: 0, aten.copy.default: 1, aten.contiguous.default: 0}
"""Operations that make a copy, and which argument they copy."""
NEUTRAL = {
    aten.mul.Tensor: 1,
    aten.mul.Scalar: 1,
    aten.div.Tensor: 1,
    aten.div.Scalar: 1,
    aten.sub.Tensor: 0,
    aten.sub.Scalar: 0,
}
"""Second arguments that change no bit. Not addition of 0, which turns -0.0 into 0.0."""
RESHAPES = (aten.view.default, aten._unsafe_view.default)


@dataclass(frozen=True)
class NoOp(Pass):
    """Removes views that show the whole of what they look at, copies nobody needs, and neutral arithmetic.

    Level: joint and stage.

    Sound because views of one memory with the same sizes, strides and offset are the same tensor; this covers
    views, expansions and slices that change nothing, `detach`, and pairs such as transpose and back. A view
    of a view of a dense tensor is one view. A copy of the same dtype, device and strides can be left out
    since programs write nothing; it stays if the copy is an output, which would then share memory with
    something else. Bitwise equal.

        before: %a = t(%x)    %b = t(%a)    %c = clone(%b)    %d = mul.Tensor(%c, 1)    %e = sin(%d)
        after:  %e = sin(%x)
    """

    name: ClassVar[str] = "noop"

    def apply(self, program: Program) -> Program:
        mode = program.fake_mode
        rewrite_nodes(
            program,
            lambda node: _same_view(node, mode) or _needless_copy(node, mode) or _one_view(node, mode),
        )
        return program


def _same_view(node: Node, mode: FakeTensorMode) -> Node | None:
    """The nearest thing a view stands on that it is equal to."""
    shown = meta.tensor(node)
    if shown is None or node.target is aten.as_strided.default:
        return None
    here, base = place(shown, mode), base_of(node)
    while here is not None and base is not None:
        found = meta.tensor(base)
        if found is None or base.target is aten.as_strided.default:
            return None
        if place(found, mode) == here:
            return base
        base = base_of(base)
    return None


def _needless_copy(node: Node, mode: FakeTensorMode) -> Node | None:
    source: object = None
    if node.target in COPIES:
        source = node.args[COPIES[node.target]]
    elif node.target in NEUTRAL and not node.kwargs:
        neutral = node.args[1]
        if isinstance(neutral, int | float) and neutral == NEUTRAL[node.target]:
            source = node.args[0]
    if not isinstance(source, Node) or node.kwargs.get("pin_memory"):
        return None
    old, new = meta.tensor(source), meta.tensor(node)
    if old is None or new is None or geometry(new, mode) is None or geometry(old, mode) != geometry(new, mode):
        return None
    return None if is_exposed(node) else source


def _one_view(node: Node, mode: FakeTensorMode) -> Node | None:
    """A reshape straight from what lies below another reshape."""
    inner = node.args[0] if node.target in RESHAPES else None
    if not isinstance(inner, Node) or inner.target not in RESHAPES:
        return None
    source = inner.args[0]
    below = meta.tensor(source) if isinstance(source, Node) else None
    if below is None or not is_dense(below, mode):
        return None
    node.target, node.args = aten.view.default, (source, node.args[1])
    return node
