"""Lets collectives run while other work is done."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch.fx import Node

from graphcomp.errors import PlanError
from graphcomp.ir.collective_calls import is_start, is_wait
from graphcomp.ir.program import Level, Program
from graphcomp.passes.base import Pass
from graphcomp.passes.reorder import reorder


@dataclass(frozen=True)
class OrderCollectives(Pass):
    """Begins collectives as early as their inputs allow, a few at a time, and waits for each as late as that lets it.

    Level: step. Collectives that do not need each other begin in the order in which their results are first used, each
    right behind the packing of its input; so a later one is under way while an earlier one is unpacked.

    under_way: the most that are at a time, as each holds its input, its result, and what the library copies of them.
    Before one more begins, the oldest is waited for and all is computed that follows from its result alone.

    Sound because programs write nothing: any order that computes values before their uses means the same. The order is
    a function of the program alone, and so the same on all ranks that run it, as a collective asks for.

        before: %a = start(%x)    %b = wait(%a)    %c = sin(%b)    %d = start(%y)    %e = wait(%d)    %f = sin(%e)
        after:  %a = start(%x)    %d = start(%y)    %b = wait(%a)    %c = sin(%b)    %e = wait(%d)    %f = sin(%e)
        (a third would begin behind %c)
    """

    under_way: int = 2
    name: ClassVar[str] = "order_collectives"
    levels: ClassVar[frozenset[Level]] = frozenset({Level.STEP})

    def __post_init__(self) -> None:
        if isinstance(self.under_way, bool) or not isinstance(self.under_way, int) or self.under_way < 1:
            what = "pass 'order_collectives' takes the most collectives under way at a time"
            raise PlanError(what, expected="a whole number from 1", got=repr(self.under_way))

    def apply(self, program: Program) -> Program:
        place = {node: (at, 0) for at, node in enumerate(program.graph.nodes)}
        returned = {node: at for at, node in reversed(list(enumerate(program.results))) if node is not None}
        end = len(place)

        def first_use(start: Node) -> tuple[int, int]:
            waits = [user for user in start.users if is_wait(user)]
            uses = [place[user] for wait in waits for user in wait.users if user.op != "output"]
            return min(uses, default=min(((end, returned[w]) for w in waits if w in returned), default=(end, end)))

        starts, following = sorted(filter(is_start, program.calls()), key=first_use), _following(program)
        early: list[Node] = []
        for at, start in enumerate(starts):
            if at >= self.under_way:
                early += following[starts[at - self.under_way]]
            early.append(start)
        reorder(program, early=early, late=is_wait)
        return program


def _following(program: Program) -> Mapping[Node, list[Node]]:
    """By collective: its wait, and what is computed of its result and of no other's."""
    several = program.output_node  # in the place of a collective
    source: dict[Node, Node] = {}
    found: defaultdict[Node, list[Node]] = defaultdict(list)
    for node in program.calls():
        above = {source[each] for each in node.all_input_nodes if each in source}
        if is_start(node):
            source[node] = node
        elif above:
            source[node] = above.pop() if len(above) == 1 else several
            found[source[node]].append(node)
    return found
