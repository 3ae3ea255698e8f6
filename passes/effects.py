"""Which operations a pass may not remove, repeat or merge, though all values would stay the same."""

from __future__ import annotations

import torch
from torch.fx import Node

from graphcomp.compat.aliasing import written_arguments
from graphcomp.compat.operators import OpOverload
from graphcomp.ir.rules_calls import FUNCTIONS

COLLECTIVES = frozenset({"_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "c10d"})


def is_random(node: Node) -> bool:
    """Whether a call draws from a random stream; their number and order are part of the meaning."""
    return isinstance(node.target, OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags


def is_collective(node: Node) -> bool:
    """Whether a call talks to other ranks (waits included); all ranks must issue the same list of them."""
    return isinstance(node.target, OpOverload) and node.target.namespace in COLLECTIVES


def has_effect(node: Node) -> bool:
    """Whether a call does more than compute its result; a user's operator is pure if its schema says so."""
    if is_random(node) or is_collective(node) or written_arguments(node):
        return True
    return not isinstance(node.target, OpOverload) and node.target not in FUNCTIONS
