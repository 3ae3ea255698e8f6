"""Which integer tensors hold counts and places, by the operations of a trace that made them. What is found here is
checked whenever such a number is read: a mistake would be an error, never another result."""

from __future__ import annotations

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from graphcomp.compat.operators import OpOverload
from graphcomp.ir.calls import arguments

aten = torch.ops.aten
_ALWAYS = frozenset(
    {aten.abs, aten.argmax, aten.argmin, aten.argsort, aten.nonzero, aten.nonzero_static, aten.bincount,
     aten.searchsorted, aten.bucketize, aten.count_nonzero}
)  # fmt: skip
"""A tensor of integers that these yield has no negative element."""
_WITH_PLACES = frozenset({aten.sort, aten.topk, aten.max, aten.min})
"""Of two results that these yield, the first is made of elements as given; the second has places, never negative."""
_AS_GIVEN = frozenset(
    {aten.sum, aten.cumsum, aten.prod, aten.amax, aten.amin, aten.max, aten.min, aten.maximum, aten.add, aten.mul,
     aten.select, aten.slice, aten.view, aten._unsafe_view, aten.reshape, aten.index, aten.index_select, aten.gather,
     aten.clone, aten.detach, aten.alias, aten.expand, aten.squeeze, aten.unsqueeze, aten.permute, aten.t,
     aten.transpose, aten.cat, aten.stack, aten._to_copy, aten.unbind, aten.split, aten.split_with_sizes, aten.roll,
     aten.flip, aten.where, aten.index_add, aten.scatter, aten.scatter_, aten.scatter_add, aten.scatter_add_,
     aten.index_add_, aten.zeros, aten.ones, aten.zeros_like, aten.ones_like, aten.new_zeros, aten.new_ones,
     aten.full, aten.arange, aten.copy_, aten.sort, aten.topk}
)  # fmt: skip
"""These yield no negative element of tensors and numbers that have none."""


def is_never_negative(node: Node) -> bool:
    """Whether all elements are 0 or more, as far as operations tell."""
    pending, seen = [node], set[Node]()
    while pending:
        current = pending.pop()
        if current in seen:
            continue
        seen.add(current)
        value = current.meta.get("val")
        if isinstance(value, torch.Tensor) and value.dtype in (torch.bool, torch.uint8):
            continue
        packet = _packet(current)
        if packet in _ALWAYS:
            continue
        if packet is None and isinstance(value, torch.Tensor) and current.op == "call_function":
            source = current.args[0]  # a part of several results
            if isinstance(source, Node) and _packet(source) in _WITH_PLACES and current.args[1] == 1:
                continue
            pending.extend(current.all_input_nodes)
            continue
        if packet not in _AS_GIVEN or _narrows(current) or not all(map(_is_amount, _amounts(current))):
            return False
        pending.extend(n for n in current.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor | list | tuple))
    return True


def _packet(node: Node) -> object:
    return node.target.overloadpacket if isinstance(node.target, OpOverload) else None


def _narrows(node: Node) -> bool:
    """Whether a cast has fewer bits than its input, of which the first then is a sign."""
    if _packet(node) is not aten._to_copy:
        return False
    before, after = (one.meta["val"].dtype for one in (node.all_input_nodes[0], node))
    return bool(before.is_floating_point or after.itemsize < before.itemsize)


def _amounts(node: Node) -> list[object]:
    """The numbers that a call is given as elements; those that say where or how many are no matter."""
    named = arguments(node)
    made = ("start", "end", "step") if _packet(node) is aten.arange else ()
    return [named[name] for name in ("self", "other", "value", "fill_value", "alpha", *made) if name in named]


def _is_amount(number: object) -> bool:
    """Whether a number, if it is one, is known not to be negative."""
    number = number.meta.get("val") if isinstance(number, Node) else number
    return not isinstance(number, Number) or statically_known_true(number >= 0)


Number = int | float | torch.SymInt | torch.SymFloat
