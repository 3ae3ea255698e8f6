"""What an operator's schema says about memory: who writes, who shares. Schemas have no public names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node

from graphcomp.compat.operators import OpOverload

UNDECLARED_VIEWS = frozenset({torch.ops.aten._unsafe_view.default})
"""Operators that return a view of their first argument though their schema does not say so."""


def written_arguments(node: Node) -> list[Node]:
    """The nodes whose tensors a call writes to."""
    return [one for one in written_values(node.target, node.args, node.kwargs) if isinstance(one, Node)]


def written_values(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Those of the arguments given to an operator that it writes to."""
    found: list[Any] = []
    if isinstance(operator, OpOverload):
        for place, argument in enumerate(_arguments(operator)):
            if argument.alias_info is not None and argument.alias_info.is_write:
                given = args[place] if place < len(args) else kwargs.get(argument.name)
                found += given if isinstance(given, list | tuple) else [given]
    return found


def memory_of(tensor: torch.Tensor) -> int:
    """A number that stands for a tensor's memory as long as that lives, also on meta, where there is no address."""
    number: int = tensor.untyped_storage()._cdata
    return number


def viewed_argument(node: Node) -> Node | None:
    """The node that a call's result shares memory with: base of a view, target of an in-place operation."""
    if isinstance(node.target, OpOverload):
        arguments = _arguments(node.target)
        if arguments and arguments[0].alias_info is not None and node.args and isinstance(node.args[0], Node):
            return node.args[0]
    return None


def _arguments(target: Any) -> list[Any]:
    return list(target._schema.arguments)
