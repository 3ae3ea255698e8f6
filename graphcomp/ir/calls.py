"""Reading the calls of a graph."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from typing import Any

from torch.fx import Node
from torch.fx.node import map_arg

from graphcomp.compat.operators import argument_names


def arguments(node: Node, known: Callable[[Node], Any] = lambda argument: argument) -> dict[str, Any]:
    """The arguments of an operator call by name, in the operator's order; `known` gives what stands for a node."""
    args, kwargs = map_arg((node.args, node.kwargs), known)
    names = argument_names(node.target)  # type: ignore[arg-type]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return {name: given[name] for name in names if name in given}


def upstream(nodes: Iterable[Node], within: Container[Node] | None = None) -> set[Node]:
    """These nodes with all that they are computed from; `within`: only what is among it."""
    found: set[Node] = set()
    pending = list(nodes)
    while pending:
        node = pending.pop()
        if node not in found and (within is None or node in within):
            found.add(node)
            pending.extend(node.all_input_nodes)
    return found
