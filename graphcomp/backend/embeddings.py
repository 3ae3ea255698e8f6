"""Gradients of embeddings, scattered straight into what they are added to.

    before: %e = embedding_dense_backward(%g, %i, 50, 3, False)   %s = add(%x, %e)
    after:  %v = where(unsqueeze(ne(%i, 3), -1), %g, 0)           %s = index_put(%x, [%i], %v, True)

Without it a matrix as large as the vocabulary is filled with zeros, and added, for the rows of a few tokens. The sum is
taken in another order, so this is for compiled programs, which round in their own way as it is.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from graphcomp.ir import meta
from graphcomp.ir.calls import arguments

_aten = torch.ops.aten


def scatter_embeddings(graph: Graph) -> int:
    """Change a graph that is about to be compiled; returns how many gradients it scatters now."""
    found = 0
    for node in list(graph.nodes):
        if node.target is not _aten.embedding_dense_backward.default or len(node.users) != 1:
            continue
        (add,) = node.users
        found += _scatter(graph, node, add)
    return found


def _outermost(graph: Graph, gradient: Node, add: Node, other: Node) -> tuple[Node, Node]:
    """(addition of this gradient, what it is added to), such that nothing is added behind it: the other terms of a tied
    weight's gradient are added to the accumulator as they are computed."""
    while len(add.users) == 1:
        (outer,) = add.users
        base = _other(outer, add)
        if base is None or base.op != "placeholder":
            break
        kept, added = meta.tensor(base), meta.tensor(add)
        if kept is None or added is None or kept.dtype is not added.dtype:
            break
        with graph.inserting_before(add) if other.op == "placeholder" else graph.inserting_after(other):
            first = graph.call_function(_aten.add.Tensor, (base, other))
        meta.set_value(first, meta.value(outer))
        outer.args = (first, gradient)
        graph.erase_node(add)
        add, other = outer, first
    return add, other


def _other(add: Node, term: Node) -> Node | None:
    """The other term of a plain sum of two."""
    if add.target is not _aten.add.Tensor or add.kwargs:
        return None
    rest = [x for x in add.args if x is not term]
    return rest[0] if len(rest) == 1 and isinstance(rest[0], Node) else None


def _scatter(graph: Graph, gradient: Node, add: Node) -> bool:
    given = arguments(gradient)
    grown, indices, padding = given["grad_output"], given["indices"], given["padding_idx"]
    other = _other(add, gradient)
    if given["scale_grad_by_freq"] or other is None:
        return False
    target, own, values = meta.tensor(other), meta.tensor(gradient), meta.tensor(grown)
    places = meta.tensor(indices)
    if target is None or own is None or values is None or places is None or target.shape != own.shape:
        return False
    if torch.promote_types(target.dtype, own.dtype) is not target.dtype or target.dtype.itemsize < 4:
        return False  # half precision would round at every row: a frequent token's sum would stop growing
    add, other = _outermost(graph, gradient, add, other)
    with graph.inserting_before(add):
        if places.dtype is not torch.int64:
            indices = graph.call_function(_aten.to.dtype, (indices, torch.int64))
        if padding >= 0:
            kept = graph.call_function(_aten.ne.Scalar, (indices, padding))
            kept = graph.call_function(_aten.unsqueeze.default, (kept, -1))
            grown = graph.call_function(_aten.where.ScalarOther, (kept, grown, 0))
        if values.dtype is not target.dtype:
            grown = graph.call_function(_aten.to.dtype, (grown, target.dtype))
        total = graph.call_function(_aten.index_put.default, (other, [indices], grown, True))
    meta.set_value(total, meta.value(add))
    add.replace_all_uses_with(total)
    graph.erase_node(add)
    graph.erase_node(gradient)
    return True
