"""Keeps the numbers of differentiable operations right when their forward nodes go."""

from __future__ import annotations

from collections.abc import Mapping

from graphcomp.ir import meta
from graphcomp.ir.meta import Phase
from graphcomp.ir.program import Program


def settle_operations(program: Program, moved: Mapping[int, int | None]) -> None:
    """Number anew the backward nodes whose forward node is gone.

    moved: the number of an operation whose node was replaced -> the number of the node in its place (None: it
    has none). A backward node follows these until it comes to an operation that is there; without one it gets
    None, and only its module tells where it belongs.
    """
    calls = program.calls()
    alive = {meta.note(node).operation for node in calls if meta.note(node).phase is not Phase.BACKWARD}
    for node in calls:
        number = start = meta.note(node).operation
        while number is not None and number not in alive:
            number = moved.get(number)
        if number != start:
            meta.amend(node, operation=number)
