"""Keeps the chunks of head and loss one behind the other where a compiler orders operations by itself.

In a program's text they are: interpreted, one chunk's logits are gone when the next begins. Inductor sees equal work on
independent rows and runs it in common loops, with the logits of all rows at once. So its graph says that the product a
chunk begins with comes after what the chunk before it has to give. That costs a copy of the product's input.

    before: %mm_1 = mm(%h1, %w)
    after:  %after = graphcomp.after(%h1, [%t0, %dw0, %dh0])    %mm_1 = mm(%after, %w)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from graphcomp.ir import meta

_LIBRARY = torch.library.Library("graphcomp", "FRAGMENT")
_PRODUCTS: dict[Any, int] = {torch.ops.aten.mm.default: 0, torch.ops.aten.addmm.default: 1}


def _after(x: torch.Tensor, others: Sequence[torch.Tensor]) -> torch.Tensor:
    """A copy of x, made when the others are there."""
    return x.clone()


_LIBRARY.define("after(Tensor x, Tensor[] others) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
_LIBRARY.impl("after", _after, "CompositeExplicitAutograd")
torch.library.register_fake("graphcomp::after", lambda x, others: torch.empty_like(x), lib=_LIBRARY)


def in_turn(graph: Graph) -> None:
    """Have the first product of every chunk wait for the chunk before it. The graph is for a compiler only: forward
    code may wait for backward code."""
    chunks: dict[int, list[Node]] = {}
    for node in graph.nodes:
        number = meta.note(node).chunk
        if number is not None:
            chunks.setdefault(number, []).append(node)
    for number, nodes in chunks.items():
        before = chunks.get(number - 1, [])
        waited = [node for node in before if meta.tensor(node) is not None and _leaves(node, number - 1)]
        product = next((node for node in nodes if node.target in _PRODUCTS), None)
        source = product.args[_PRODUCTS[product.target]] if product is not None else None
        if product is None or not waited or not isinstance(source, Node):
            continue
        with graph.inserting_before(product):
            turn = graph.call_function(torch.ops.graphcomp.after.default, (source, waited))
        meta.set_value(turn, meta.value(source))
        meta.inherit(turn, product)
        product.replace_input_with(source, turn)


def _leaves(node: Node, number: int) -> bool:
    return any(user.op == "output" or meta.note(user).chunk != number for user in node.users)
