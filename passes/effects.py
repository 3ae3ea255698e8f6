"""Which operations a pass may not remove, repeat or merge, though the program's values would stay the same."""

from __future__ import annotations

import torch
from torch.fx import Node

from graphcomp.compat.aliasing import written_arguments
from graphcomp.compat.operators import OpOverload

COLLECTIVES = frozenset({"_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "c10d"})


def is_random(node: Node) -> bool:
    """Whether a call draws from a random stream; the number and order of draws is part of what a program means."""
    return isinstance(node.target, OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags


def is_collective(node: Node) -> bool:
    """Whether a call talks to other ranks (waits included); all ranks must issue the same list of them."""
    return isinstance(node.target, OpOverload) and node.target.namespace in COLLECTIVES


def is_known(node: Node) -> bool:
    """Whether a call's effects are known at all: torch's own operations and arithmetic on sizes."""
    if isinstance(node.target, OpOverload):
        return node.target.namespace in ("aten", "prims", "prim")
    return getattr(node.target, "__module__", "") in ("_operator", "math", "torch")


def has_effect(node: Node) -> bool:
    """Whether a call does more than compute its result. A user's operator is trusted to be pure if its schema is."""
    if is_random(node) or is_collective(node) or written_arguments(node):
        return True
    return not isinstance(node.target, OpOverload) and not is_known(node)
