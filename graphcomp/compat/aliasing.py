"""What an operator's schema says about memory: who writes, who shares. Schemas have no public names."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from graphcomp.compat.operators import OpOverload

UNDECLARED_VIEWS = frozenset({torch.ops.aten._unsafe_view.default})
"""Operators that return a view of their first argument though their schema does not say so."""


def written_arguments(node: Node) -> list[Node]:
    """The nodes whose tensors a call writes to."""
    found: list[Any] = []
    if isinstance(node.target, OpOverload):
        for place, argument in enumerate(_arguments(node.target)):
            if argument.alias_info is not None and argument.alias_info.is_write:
                given = node.args[place] if place < len(node.args) else node.kwargs.get(argument.name)
                found += given if isinstance(given, list | tuple) else [given]
    return [node for node in found if isinstance(node, Node)]


def viewed_argument(node: Node) -> Node | None:
    """The node that a call's result shares memory with: base of a view, target of an in-place operation."""
    if isinstance(node.target, OpOverload):
        arguments = _arguments(node.target)
        if arguments and arguments[0].alias_info is not None and node.args and isinstance(node.args[0], Node):
            return node.args[0]
    return None


def _arguments(target: Any) -> list[Any]:
    return list(target._schema.arguments)
