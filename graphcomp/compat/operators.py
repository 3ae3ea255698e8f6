"""Operators. Their classes and schemas have no public names, yet a graph's targets are nothing else."""

from __future__ import annotations

from typing import Any

from torch._ops import HigherOrderOperator, OpOverload

__all__ = ["HigherOrderOperator", "OpOverload", "argument_names", "is_mutable"]


def argument_names(target: OpOverload) -> list[str]:
    """The names of an operator's arguments, in order."""
    schema: Any = target._schema
    return [argument.name for argument in schema.arguments]


def is_mutable(target: OpOverload) -> bool:
    """Whether the operator's schema says that it writes to an argument."""
    schema: Any = target._schema
    return bool(schema.is_mutable)
