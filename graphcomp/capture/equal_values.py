"""Which values of a graph are equal while it is being traced."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Node

from graphcomp.compat.aliasing import UNDECLARED_VIEWS, viewed_argument, written_arguments
from graphcomp.compat.operators import OpOverload


def last_node(node: Node) -> Node:
    """The last node of the trace so far."""
    last: Node = next(iter(reversed(node.graph.nodes)))
    return last


def equal(one: Node, other: Node, asked: Node) -> bool:
    """Whether a node holds now what another held once: the same node, or the same operations on the same values.

    Not where memory that they read was written to since the first of these operations; of one node, since it was asked.

    asked: the last node of the trace at the time when the contents of `one`, made before `other`, were asked for.
    """
    if one.graph is not other.graph:
        return False
    own: set[Node] = set()
    pending = [(one, other)]
    while pending:
        first, second = pending.pop()
        if first is second or second in own:
            continue
        if not _is_pure(first) or first.target is not second.target:
            return False
        own |= {first, second}
        arguments = [list(_flat((node.args, node.kwargs))) for node in (first, second)]
        if len(arguments[0]) != len(arguments[1]):
            return False
        for left, right in zip(*arguments, strict=True):
            if isinstance(left, Node) and isinstance(right, Node):
                pending.append((left, right))
            elif type(left) is not type(right) or left != right:
                return False
    read = {_memory(node) for each in own or {one} for node in (each, *each.all_input_nodes)}
    node, earliest = last_node(other), set(own)
    while earliest or not (own or node is asked):
        if not read.isdisjoint(map(_memory, written_arguments(node))):
            return False
        earliest.discard(node)
        node = node.prev
    return True


def sketch(node: Node, depth: int = 3) -> str:
    """A text that is the same for nodes that are equal; most others have another."""
    if depth == 0 or node.op != "call_function":
        return str(node.op)
    parts = (
        sketch(part, depth - 1) if isinstance(part, Node) else str(part) for part in _flat((node.args, node.kwargs))
    )
    return f"{node.target}({', '.join(parts)})"


def _memory(node: Node) -> Node:
    """The node that made the memory of a node's tensor."""
    base: Any = node
    while base is not None:
        node = base
        is_part = node.target is operator.getitem or node.target in UNDECLARED_VIEWS
        base = node.args[0] if is_part else viewed_argument(node)
    return node


def _is_pure(node: Node) -> bool:
    if not isinstance(node.target, OpOverload):
        return node.op == "call_function" and node.target is operator.getitem
    return node.target.namespace in ("aten", "prims") and torch.Tag.nondeterministic_seeded not in node.target.tags


def _flat(argument: object) -> Iterator[object]:
    """What a call is given, with marks where lists begin and end, so that equal sequences mean equal arguments."""
    if isinstance(argument, dict):
        argument = [part for item in sorted(argument.items()) for part in item]
    if isinstance(argument, list | tuple):
        yield "["
        for part in argument:
            yield from _flat(part)
        yield "]"
    elif isinstance(argument, slice):
        yield from _flat(["slice", argument.start, argument.stop, argument.step])
    else:
        yield argument
