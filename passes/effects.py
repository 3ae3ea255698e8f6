"""Which operations a pass may not remove, repeat or merge, though all values would stay the same."""

from __future__ import annotations

from torch.fx import Node

from graphcomp.compat.aliasing import written_arguments
from graphcomp.compat.higher_order import PLAIN
from graphcomp.compat.operators import OpOverload
from graphcomp.ir.effects import is_impure, is_random
from graphcomp.ir.rules_calls import FUNCTIONS

__all__ = ["has_effect", "is_random"]


def has_effect(node: Node) -> bool:
    """Whether a call does more than compute its result; a user's operator is pure if its schema says so."""
    if is_impure(node) or written_arguments(node):
        return True
    return not isinstance(node.target, OpOverload) and node.target not in FUNCTIONS and node.target not in PLAIN
