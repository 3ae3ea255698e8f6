"""Puts the nodes of a program into another order that keeps every value before its uses."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch.fx import Node

from graphcomp.ir.program import Program
from graphcomp.passes.effects import is_random


def reorder(program: Program, early: Sequence[Node] = (), late: Callable[[Node], bool] = lambda node: False) -> None:
    """Sort the calls: those of `early` first and in this order, the rest as they stand, each behind what it needs.

    late: nodes that wait until another node, or the output, needs them; unneeded ones come last.

    Random operations keep their order. A function of the graph alone, so that equal programs come out equal.
    """
    output, calls = program.output_node, program.calls()
    random = list(filter(is_random, calls))
    draw_before = dict(zip(random[1:], random, strict=False))
    done = set(program.placeholders)
    needed = [*early, *(node for node in calls if not late(node)), *output.all_input_nodes, *calls]
    for wanted in needed:
        stack = [wanted]
        while stack:
            node = stack[-1]
            behind = [*node.all_input_nodes, *([draw_before[node]] if node in draw_before else [])]
            missing = [other for other in behind if other not in done]
            if missing and node not in done:
                stack += reversed(missing)
                continue
            stack.pop()
            if node not in done:
                done.add(node)
                output.prepend(node)
