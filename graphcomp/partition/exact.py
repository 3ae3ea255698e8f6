"""Which operations give the same bits whatever code computes them, of inputs that are the same."""

from __future__ import annotations

import torch
from torch.fx import Node

from graphcomp.compat.operators import CAST, OpOverload
from graphcomp.compat.pytree import tree_flatten
from graphcomp.ir import meta

_aten = torch.ops.aten
_MOVES = {
    *(_aten.view, _aten.reshape, _aten._unsafe_view, _aten.expand, _aten.permute, _aten.transpose, _aten.t),
    *(_aten.squeeze, _aten.unsqueeze, _aten.select, _aten.slice, _aten.diagonal, _aten.unfold, _aten.split),
    *(_aten.split_with_sizes, _aten.unbind, _aten.cat, _aten.stack, _aten.clone, _aten.detach, _aten.alias, _aten.copy),
    *(_aten.index, _aten.index_select, _aten.gather, _aten.embedding, _aten.flip, _aten.roll, _aten.repeat),
    _aten.where,
    *(_aten.masked_fill, _aten.index_put, _aten.scatter, _aten.constant_pad_nd, _aten.neg, _aten.abs, _aten.sign),
    *(_aten.zeros, _aten.ones, _aten.zeros_like, _aten.ones_like, _aten.new_zeros, _aten.new_ones, _aten.amax),
    *(_aten.amin, _aten.maximum, _aten.minimum, _aten.round, _aten.floor, _aten.ceil, _aten.trunc),
}
"""Of floating point, these move what is there, or find what it holds exactly; others may round."""
_ROUND_ONCE = {CAST, _aten.scalar_tensor, _aten.full, _aten.full_like, _aten.new_full}
"""So do these, but of so few bits that code computes in more, where it leaves the rounding out."""


def is_exact(node: Node) -> bool:
    """Whether a call yields the same bits in all code: numbers, integers and bools; of floating point, moves, and casts
    that are not short of bits."""
    packet = node.target.overloadpacket if isinstance(node.target, OpOverload) else None
    for dtype in _dtypes(node) if packet is not None else ():
        if _is_rounded(dtype) and packet not in _MOVES and (packet not in _ROUND_ONCE or _is_short(dtype)):
            return False
    # Code that computes in more bits than a tensor has compares with a number that was not rounded to these.
    given = (dtype for source in node.all_input_nodes for dtype in _dtypes(source))
    return not any(map(_is_short, given)) or not any(isinstance(n, float) and n != 0 for n in node.args)


def _is_short(dtype: torch.dtype) -> bool:
    return _is_rounded(dtype) and dtype.itemsize < 4


def _is_rounded(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _dtypes(node: Node) -> list[torch.dtype]:
    """Of the tensors that a node yields."""
    return [x.dtype for x in tree_flatten(meta.value(node))[0] if isinstance(x, torch.Tensor)]
