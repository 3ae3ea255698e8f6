"""Sums written to the memory of one of their terms, in a graph that Inductor is about to lower.

    before: %g = mm(%a, %b)    %s = add(%acc, %g)                       return %s
    after:  addmm_(%acc, %a, %b)                                        return None

    before: %g = sin(%a)       %s = add(%acc, %g)                       return %s
    after:  %g = sin(%a)       %s = add(%acc, %g)    copy_(%acc, %s)    return None

A matrix product is added by the matrix library as it computes, and never has memory of its own: the gradient of a
weight is as large as the weight. Anything else is copied, which Inductor makes one with the operation before it.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from graphcomp.compat.logs import unlogged

aten = torch.ops.aten


def write_sums(graph: Graph, written: Sequence[tuple[int, int]]) -> None:
    """Change a decomposed graph. written: (input, output) by place: the output, a sum with that input as one term, is
    written to the input's memory, and None is returned for it.

    A write stands right behind what is written: there Inductor writes, and lets go of what it has added.
    """
    output = graph.output_node()
    results: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    placeholders = graph.find_nodes(op="placeholder")
    for source, target in written:
        place, total = placeholders[source], results[target]
        left = _add_products(graph, total, place)
        if left is not place:
            _append(graph, left, aten.copy_.default, place, left)
        results[target] = None
    output.args = (tuple(results),)
    graph.eliminate_dead_code()


@contextlib.contextmanager
def products_in_place() -> Iterator[None]:
    """Within, Inductor calls the in-place product as it is. It would by itself, but not where the variable CI is set:
    there it insists on the decomposition, which is out of place. Code in C++ calls it through torch's dispatcher, as
    there is no shorter way, and Inductor would warn of each call."""
    from torch._inductor.lowering import lowerings, make_fallback

    if aten.addmm_.default not in lowerings:
        make_fallback(aten.addmm_.default, warn=False)
    with unlogged("torch._inductor.ir", _is_of_that_operator):
        yield


def _is_of_that_operator(record: logging.LogRecord) -> bool:
    return isinstance(record.args, tuple) and any(one is aten.addmm_.default for one in record.args)


def _add_products(graph: Graph, total: Node, place: Node) -> Node:
    """Add the matrix products of a sum to `place`; returns what then remains to be written there, or `place`."""
    rows = total.target is aten.index_put.default and _is_sum(total.args[0])
    if rows:  # added to single rows of a sum
        total.update_arg(0, _add_products(graph, total.args[0], place))  # type: ignore[arg-type]
        return total
    terms = _terms(total)
    products = [term for term in terms if _is_product(term) and terms.count(term) == 1]
    if not products or terms.count(place) != 1:
        return _plain(total)
    for product in products:
        _append(graph, product, aten.addmm_.default, place, *product.args[:2])
    left = place
    for term in terms:
        if term is not place and term not in products:
            left = _before(graph, total, left, term)
    return left


def _is_product(node: Node) -> bool:
    return node.target is aten.mm.default and len(node.users) == 1


def _terms(total: Node) -> list[Node]:
    """Of nested sums, each of which serves only the next."""
    return [term for part in total.args for term in _terms(part)] if _is_sum(total) else [total]  # type: ignore[arg-type]


def _is_sum(node: Any) -> bool:
    """Of two tensors of its own form, used at most once."""
    if not isinstance(node, Node) or node.target is not aten.add.Tensor or node.kwargs or len(node.users) > 1:
        return False
    form = _form(node)
    return all(isinstance(part, Node) and _form(part) == form for part in node.args)


def _form(node: Node) -> tuple[Any, ...]:
    value = node.meta["val"]
    return value.dtype, *value.shape


def _plain(total: Node) -> Node:
    """The same sum, but not taken for the bias of a product, which would need a result of its own to be copied."""
    if _is_sum(total):
        total.target = torch.ops.prims.add.default
    return total


def _before(graph: Graph, total: Node, left: Node, right: Node) -> Node:
    with graph.inserting_before(total):
        added = graph.call_function(torch.ops.prims.add.default, (left, right))
    added.meta["val"] = total.meta["val"]
    return added


def _append(graph: Graph, behind: Node, operation: Any, place: Node, *operands: Any) -> None:
    with graph.inserting_after(behind):
        written = graph.call_function(operation, (place, *operands))
    written.meta["val"] = place.meta["val"]
