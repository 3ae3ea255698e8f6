"""Lets collectives run while other work is done."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch.fx import Node

from graphcomp.ir.collective_calls import is_start, is_wait
from graphcomp.ir.program import Level, Program
from graphcomp.passes.base import Pass
from graphcomp.passes.reorder import reorder


@dataclass(frozen=True)
class OrderCollectives(Pass):
    """Begins collectives as early as their inputs allow, and waits for each right before its first use.

    Level: step. Collectives that do not need each other begin in the order in which their results are first used, each
    right behind the packing of its input; so a later one is under way while an earlier one is unpacked.

    Sound because programs write nothing: any order that computes values before their uses means the same. The order is
    a function of the program alone, and so the same on all ranks that run it, as a collective asks for.

        before: %a = start(%x)    %b = wait(%a)    %c = sin(%b)    %d = start(%y)    %e = wait(%d)    %f = sin(%e)
        after:  %a = start(%x)    %d = start(%y)    %b = wait(%a)    %c = sin(%b)    %e = wait(%d)    %f = sin(%e)
    """

    name: ClassVar[str] = "order_collectives"
    levels: ClassVar[frozenset[Level]] = frozenset({Level.STEP})

    def apply(self, program: Program) -> Program:
        place = {node: (at, 0) for at, node in enumerate(program.graph.nodes)}
        returned = {node: at for at, node in reversed(list(enumerate(program.results))) if node is not None}
        end = len(place)

        def first_use(start: Node) -> tuple[int, int]:
            waits = [user for user in start.users if is_wait(user)]
            uses = [place[user] for wait in waits for user in wait.users if user.op != "output"]
            return min(uses, default=min(((end, returned[w]) for w in waits if w in returned), default=(end, end)))

        starts = sorted(filter(is_start, program.calls()), key=first_use)
        reorder(program, early=starts, late=is_wait)
        return program
