"""Rematerialisation: what a stage's backward computes again instead of keeping it since the forward.

Level: stages, where forward and backward are programs of their own; one program of both keeps nothing. A saved value
that is one cheap pointwise operation away from values that are kept anyway, or that every program has, is not saved.

    forward:  h = addmm(...)  a = gelu(h)  y = addmm(a, ...)   saved: h, a      ->  saved: h
    backward: mm(g, a)  gelu_backward(ga, h)                                    ->  a = gelu(h)  mm(g, a) ...

Sound: the same operation on the same values gives the same bits. The table below is closed; nothing in it draws random
numbers, communicates or writes. Cheap: the backward of such an operation reads its input too, so that a compiler
computes both in one loop; the peak falls by the value's bytes for each microbatch in flight.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch.fx import Node

from graphcomp.compat.aliasing import viewed_argument
from graphcomp.compat.operators import CAST, OpOverload
from graphcomp.ir.run_time_sizes import has_run_time_size
from graphcomp.partition.place import Slot
from graphcomp.partition.traits import is_number, is_view

_aten = torch.ops.aten
_CHEAP = {
    *(_aten.gelu, _aten.silu, _aten.relu, _aten.leaky_relu, _aten.hardtanh, _aten.clamp, _aten.sigmoid, _aten.tanh),
    *(_aten.add, _aten.sub, _aten.mul, _aten.neg, _aten.abs, _aten.where, _aten.masked_fill, _aten.logical_not),
    *(_aten.eq, _aten.ne, _aten.lt, _aten.le, _aten.gt, _aten.ge, CAST),
}


def without_recomputable(saved: Sequence[Node], stage: int, slots: Mapping[Node, Slot]) -> list[Node]:
    """The values that the forward of `stage` has to save, in the order given, which is that of the graph."""
    kept = set(saved)
    for node in saved:
        own = slots.get(node) == Slot(False, stage)
        if own and _is_cheap(node) and all(_is_at_hand(one, kept, stage, slots) for one in node.all_input_nodes):
            kept.remove(node)
    return [node for node in saved if node in kept]


def _is_cheap(node: Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target.overloadpacket in _CHEAP


def _is_at_hand(node: Node, kept: set[Node], stage: int, slots: Mapping[Node, Slot]) -> bool:
    """Whether the backward has a value without computing more than its own stage's views of what it has."""
    base: Node | None = node
    while base is not None:
        if base in kept or base.op == "placeholder" or (is_number(base) and not has_run_time_size(base)):
            return True
        own = slots.get(base, Slot(False, stage)) == Slot(False, stage)  # a view of another stage arrives, or does not
        base = viewed_argument(base) if is_view(base) and own else None
    return False
