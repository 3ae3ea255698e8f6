"""Reductions of a step program in the memory of what they reduce: one copy of every gradient less."""

from __future__ import annotations

import torch
from torch.fx import Node

from graphcomp.compat.collective_operators import ALL_REDUCE, ALL_REDUCE_IN_PLACE
from graphcomp.ir.program import Program

aten = torch.ops.aten
_SAME_MEMORY = frozenset({aten.view.default, aten.contiguous.default, aten.slice.Tensor})


def reduce_in_place(program: Program) -> Program:
    """A copy in which a reduction overwrites its operand wherever nobody else reads that memory.

    It is no pure program any more: only for making it callable. The caller hands its inputs over, so they may be
    overwritten as well.
    """
    copy = program.copy()
    for node in copy.graph.nodes:
        if node.target is ALL_REDUCE and _alone(node.args[0]):
            node.target = ALL_REDUCE_IN_PLACE
    return copy


def _alone(value: Node) -> bool:
    """Whether a value has one reader, and so has everything whose memory it may share."""
    while len(value.users) == 1:
        if value.target not in _SAME_MEMORY:
            return True
        value = value.args[0]  # type: ignore[assignment]
    return False
