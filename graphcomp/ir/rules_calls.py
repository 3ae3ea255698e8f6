"""Rules about the operations of a program and how they hang together."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator

import torch
from torch.fx import Node
from torch.fx.node import map_aggregate

from graphcomp.compat.operators import HigherOrderOperator, OpOverload, is_mutable
from graphcomp.ir import meta
from graphcomp.ir.collective_calls import axis_of, is_start, is_wait
from graphcomp.ir.effects import FUNCTIONAL, is_collective
from graphcomp.ir.fault import Fault
from graphcomp.ir.groups import is_text, text_of
from graphcomp.ir.meta import Phase
from graphcomp.ir.program import Program
from graphcomp.plan import AXES

# Python functions that may stand for arithmetic on sizes, and the choice of one value of several.
FUNCTIONS: frozenset[object] = frozenset({
    operator.getitem, operator.add, operator.sub, operator.mul, operator.floordiv, operator.truediv,
    operator.mod, operator.neg, operator.pos, operator.abs, operator.pow, operator.lshift, operator.rshift,
    operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge, operator.and_, operator.or_,
    operator.xor, operator.not_, torch.sym_max, torch.sym_min, torch.sym_int, torch.sym_float, torch.sym_ite,
    torch.sym_not, torch.sym_sum, torch.sym_sqrt, math.ceil, math.floor, math.trunc, round, abs, min, max, float,
    int, pow,
})  # fmt: skip

_READS_SIZES = frozenset({"aten::sym_size", "aten::sym_stride", "aten::sym_numel", "aten::sym_storage_offset"})
_READS_CONTENTS = frozenset(
    {"aten::_local_scalar_dense", "aten::item", "aten::is_nonzero", "aten::equal", "aten::allclose"}
)
# Write the running statistics they are given although their schemas do not say so: name -> place of the flag
# `training`, and of the running mean.
_WRITES_STATISTICS = {
    "aten::native_batch_norm": (5, 3),
    "aten::cudnn_batch_norm": (5, 3),
    "aten::miopen_batch_norm": (5, 3),
}


def order(program: Program) -> Iterator[Fault]:
    nodes = list(program.graph.nodes)
    outputs = [node for node in nodes if node.op == "output"]
    if len(outputs) != 1 or nodes[-1] is not outputs[0]:
        yield Fault("the graph does not end in its one output node", expected=1, got=len(outputs))
        return
    seen: set[Node] = set()
    calls_began = False
    for node in nodes:
        if node.op == "placeholder" and calls_began:
            yield Fault(f"input '{node.name}' stands behind the first call", node)
        calls_began = calls_began or node.op != "placeholder"
        for argument in node.all_input_nodes:
            if argument not in seen:
                got = "a node further down" if argument in nodes else "a node of another graph, or erased"
                yield Fault(f"'{node.name}' uses '{argument.name}' before it is computed", node, got=got)
        seen.add(node)


def calls(program: Program) -> Iterator[Fault]:
    for node in program.calls():
        if node.op != "call_function":
            do = "make it an input of the program" if node.op == "get_attr" else None
            yield Fault(f"'{node.name}' is a {node.op} node", node, "call_function", node.op, do)
        elif not isinstance(node.target, OpOverload | HigherOrderOperator) and node.target not in FUNCTIONS:
            expected = "an operator with its overload, or a function of `FUNCTIONS`"
            yield Fault(f"'{node.name}' calls an unknown function", node, expected, node.target)


def pure(program: Program) -> Iterator[Fault]:
    for node in program.calls():
        if isinstance(node.target, OpOverload) and is_mutable(node.target):
            do = "use the functional form; make the new value an output"
            yield Fault(f"'{node.name}' writes to its arguments", node, "a functional operator", node.target, do)
        training, mean = _WRITES_STATISTICS.get(_name(node), (0, 0))
        if training and len(node.args) > training and node.args[training] and node.args[mean] is not None:
            do = "use aten._native_batch_norm_legit_functional; make the new statistics outputs"
            yield Fault(f"'{node.name}' writes its running statistics", node, got=node.target, do=do)


def device(program: Program) -> Iterator[Fault]:
    for node in program.calls():
        if _name(node) in _READS_CONTENTS:
            yield Fault(f"'{node.name}' reads the contents of a tensor on the host", node, got=node.target)
        if _name(node) in _READS_SIZES:
            do = "compute it from the size inputs"
            yield Fault(f"'{node.name}' reads a size off a tensor", node, "a size input", node.target, do)


def literals(program: Program) -> Iterator[Fault]:
    for node in program.calls():
        found: list[object] = []
        map_aggregate((node.args, node.kwargs), found.append)
        for part in found:
            if isinstance(part, torch.Tensor):
                yield Fault(f"an argument of '{node.name}' is a tensor", node, "an input", type(part).__name__)
            if isinstance(part, torch.SymInt | torch.SymFloat | torch.SymBool):
                yield Fault(f"an argument of '{node.name}' is a symbolic number", node, "a node", str(part))


def waits(program: Program) -> Iterator[Fault]:
    for node in program.calls():
        if is_wait(node):
            pending = node.args[0]
            source = pending.args[0] if isinstance(pending, Node) and pending.target is operator.getitem else pending
            if not isinstance(source, Node) or not is_start(source):
                yield Fault(f"'{node.name}' waits for what is no collective", node, "a collective", str(source))
        if not is_start(node):
            continue
        parts = [user for user in node.users if user.target is operator.getitem]
        found = meta.value(node)
        if isinstance(found, list | tuple) and len(parts) != len(found):  # one wait for each part
            yield Fault(f"not all parts of '{node.name}' are waited for", node, f"{len(found)} parts", len(parts))
        for pending in parts or [node]:
            users = list(pending.users)
            if len(users) != 1 or not is_wait(users[0]):
                got = ", ".join(f"'{user.name}'" for user in users) or "no user"
                yield Fault(f"collective '{pending.name}' is not waited for once", pending, "one wait_tensor", got)


def groups(program: Program) -> Iterator[Fault]:
    for node in program.calls():
        if not is_collective(node):
            continue
        if getattr(node.target, "namespace", None) != FUNCTIONAL:
            do = "use graphcomp.collectives"
            yield Fault(f"'{node.name}' is no functional collective", node, f"{FUNCTIONAL}.*", node.target, do)
        name = axis_of(node)
        if name is not None and not is_text(name):
            expected = f"one of {', '.join(AXES)}, or a text such as {text_of((0, 1))!r}"
            yield Fault(f"collective '{node.name}' names its ranks by a process group", node, expected, repr(name))


def phases(program: Program) -> Iterator[Fault]:
    for node in program.calls():
        if meta.note(node).phase != Phase.BACKWARD:
            for argument in node.all_input_nodes:
                if argument.op == "call_function" and meta.note(argument).phase == Phase.BACKWARD:
                    what = f"{meta.note(node).phase} node '{node.name}' uses backward node '{argument.name}'"
                    yield Fault(what, node, do="annotate new nodes with `meta.inherit`")


def _name(node: Node) -> str:
    """Namespace and name of an operator, without overload; empty for other targets."""
    return node.target.name().partition(".")[0] if isinstance(node.target, OpOverload) else ""
