"""What a call does besides computing its result: the one place that says which calls draw, communicate, wait or check.

Such calls are never removed, merged, repeated or computed again by the compiler, though all values would stay the same:
the next draw would be another, and all ranks of a group must issue the same list of collectives.
"""

from __future__ import annotations

import operator

import torch
from torch.fx import Node

from graphcomp.compat.operators import OpOverload, returns_nothing
from graphcomp.compat.reads import READS
from graphcomp.ir.collective_calls import is_start

FUNCTIONAL = "_c10d_functional"
"""The namespace of collectives that return a new tensor, which a wait completes."""
_OTHERS = frozenset({"_c10d_functional_autograd", "c10d_functional", "c10d"})


def is_random(node: Node) -> bool:
    """Whether a call draws from a random stream; their number and order are part of the meaning."""
    return isinstance(node.target, OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags


def is_collective(node: Node) -> bool:
    """Whether a call talks to other ranks, waits included."""
    if not isinstance(node.target, OpOverload):
        return False
    return node.target.namespace == FUNCTIONAL or node.target.namespace in _OTHERS or is_start(node)


def reads_numbers(node: Node) -> bool:
    """Whether a call waits for the device in order to read numbers, such as how many rows an exchange moves."""
    return node.target in READS


def is_read_number(node: Node) -> bool:
    """Whether a node is a number that such a call has read."""
    source = node.args[0] if node.target is operator.getitem else None
    return isinstance(source, Node) and reads_numbers(source)


def finds_places(node: Node) -> bool:
    """Whether a call finds as many elements of a mask as were counted before, and so must be given the same mask."""
    return node.target is torch.ops.aten.nonzero_static.default


def is_check(node: Node) -> bool:
    """Whether a call has no result: it raises unless what it is given is right, as where a matrix is singular."""
    return returns_nothing(node.target)


def is_impure(node: Node) -> bool:
    """Whether computing a node twice, or not at all, differs from computing it once: draws, collectives, waiting,
    checks."""
    return is_random(node) or is_collective(node) or reads_numbers(node) or is_check(node)
