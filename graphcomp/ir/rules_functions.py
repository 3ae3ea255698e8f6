"""Rules about the functions that operators take."""

from __future__ import annotations

from collections.abc import Iterator

from torch.fx import Node

from graphcomp.compat.higher_order import PLAIN
from graphcomp.compat.operators import HigherOrderOperator, OpOverload, is_mutable
from graphcomp.ir import meta
from graphcomp.ir.body import Body, bodies_of
from graphcomp.ir.effects import is_impure
from graphcomp.ir.fault import Fault
from graphcomp.ir.program import Program
from graphcomp.ir.rules_calls import FUNCTIONS


def functions(program: Program) -> Iterator[Fault]:
    for node in program.calls():
        bodies = bodies_of(node)
        if isinstance(node.target, HigherOrderOperator) and node.target not in PLAIN:
            known = ", ".join(operator.name() for operator in PLAIN)
            yield Fault(f"'{node.name}' calls an operator that nothing is known of", node, known, node.target.name())
        elif bodies and node.target not in PLAIN:
            yield Fault(f"'{node.name}' is given a function", node, "an operator that takes functions", node.target)
        for body in bodies:
            for inner in body.calls:
                what = _wrong(body, inner)
                if what is not None:
                    yield Fault(f"in a function of '{node.name}', '{inner.name}' {what}", node, got=inner.target)


def _wrong(body: Body, node: Node) -> str | None:
    if node.op != "call_function" or not (isinstance(node.target, OpOverload) or node.target in FUNCTIONS):
        return "is no call of an operator"
    if any(source.graph is not body.graph for source in node.all_input_nodes):
        return "uses a value from outside"
    if is_impure(node) or (isinstance(node.target, OpOverload) and is_mutable(node.target)):
        return "does more than compute its result"
    return None if meta.value(node) is not None else "has no known value"
