"""Bring a traced graph into the normal form of programs: sizes are inputs, not operations on tensors."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Mapping
from typing import Any

import sympy
import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from graphcomp.compat.symbols import FakeTensorMode, expression, size_value
from graphcomp.errors import CaptureError
from graphcomp.ir import meta
from graphcomp.ir.effects import is_read_number, reads_numbers
from graphcomp.ir.relations import is_checked

SHAPE_READS = frozenset(
    {
        torch.ops.aten.sym_size.int,
        torch.ops.aten.sym_numel.default,
        torch.ops.aten.sym_stride.int,
        torch.ops.aten.sym_storage_offset.default,
    }
)
_OPERATIONS = {
    "Add": operator.add,
    "Mul": operator.mul,
    "FloorDiv": operator.floordiv,
    "PythonMod": operator.mod,
    "Mod": operator.mod,
    "Max": torch.sym_max,
    "Min": torch.sym_min,
    "BitwiseFn_bitwise_and": operator.and_,
    "BitwiseFn_bitwise_or": operator.or_,
    "BitwiseFn_bitwise_xor": operator.xor,
    "ToFloat": torch.sym_float,
    "IntTrueDiv": operator.truediv,
    "FloatTrueDiv": operator.truediv,
    "TruncToInt": math.trunc,
    "FloorToInt": math.floor,
    "CeilToInt": math.ceil,
}
_MAKE_FRACTIONS = frozenset({torch.sym_float, operator.truediv})

_NUMBER = re.compile(r"(_\d+)+$")


def number_of(node: Node, mode: FakeTensorMode) -> sympy.Expr | int | None:
    """The expression behind an integer-valued node; None for every other node."""
    found = meta.value(node)
    if isinstance(found, bool) or not isinstance(found, (int, torch.SymInt)):
        return None
    return expression(mode, found)


def lift_sizes(graph: Graph, mode: FakeTensorMode, inputs: Mapping[str, Node]) -> None:
    """Replace each node that computes a size by the size's input, or by the plain number it is known to be.

    `inputs`: the placeholder of every symbol, by name. Integer nodes that are proper expressions stay, now computed
    from those placeholders; reads of a tensor's shape are rebuilt from the same placeholders, and so is what the tracer
    made of a size that it had not seen computed: sums and products of many at once.

    A number that is read at run time is an input in this respect, from the node on that takes it out of what was read.
    What was read only to find numbers that are known by then is not read, unless that they are the same is checked.
    """
    known, split = dict(inputs), dict[sympy.Basic, Node]()
    for node in list(graph.nodes):
        number = number_of(node, mode) if node.op == "call_function" else None
        if number is None:
            continue
        if is_read_number(node) and is_checked(node):
            if not isinstance(number, int) and number.is_Symbol:
                known.setdefault(str(number), node)
            continue
        if isinstance(number, int):
            replace_by_number(node, number)
        elif number.is_Symbol and str(number) in known:
            node.replace_all_uses_with(known[str(number)])
        elif number in split:
            node.replace_all_uses_with(split[number])
        elif is_read_number(node):
            split[number] = node
            if number.is_Symbol:
                known[str(number)] = node
            continue
        elif node.target in SHAPE_READS or _is_of_many(node):
            with graph.inserting_before(node):
                node.replace_all_uses_with(computed(graph, number, known, node))
        else:
            continue
        graph.erase_node(node)
    for node in reversed(graph.nodes):
        if (is_read_number(node) or (reads_numbers(node) and not is_checked(node))) and not node.users:
            graph.erase_node(node)


def _is_of_many(node: Node) -> bool:
    return node.target is torch.sym_sum or (node.target is operator.mul and len(node.args) > 2)


def replace_by_number(node: Node, number: int) -> None:
    """Put a plain number in the place of a node wherever it is used (fx itself can only put nodes)."""

    def swap(argument: Node) -> Any:
        return number if argument is node else argument

    for user in list(node.users):
        user.args = map_arg(user.args, swap)
        user.kwargs = map_arg(user.kwargs, swap)


def computed(graph: Graph, number: sympy.Expr, inputs: Mapping[str, Node], like: Node) -> Node:
    """Nodes that compute an expression of sizes, at the current insertion point, annotated like `like`."""

    def visit(part: sympy.Expr) -> Any:
        if part.is_Number:
            return int(part) if part.is_Integer else float(part)
        if part.is_Symbol:
            return inputs[str(part)]
        if part.is_Pow and part.exp.is_Integer and part.exp > 1:  # such as the elements of a square matrix
            return product(visit(part.base), part.base, int(part.exp))
        function = _OPERATIONS.get(part.func.__name__)
        if function is None:
            raise CaptureError(
                f"a tensor's size is an expression that cannot be computed from the batch: {number}",
                where=", ".join(meta.place(like)) or f"a size that {like.target} reads",
                do="make the size depend on the batch by sums, products, quotients, min, max and int() only",
            )
        result = visit(part.args[0])
        if len(part.args) == 1:
            return call(function, part, result)
        for count, argument in enumerate(part.args[1:], start=2):
            result = call(function, part.func(*part.args[:count]), result, visit(argument))
        return result

    def product(base: Any, expression: sympy.Expr, exponent: int) -> Any:
        result = base
        for count in range(2, exponent + 1):
            result = call(operator.mul, expression**count, result, base)
        return result

    def call(function: Any, expression: sympy.Expr, *given: Any) -> Node:
        result = graph.call_function(function, given)
        fraction = function in _MAKE_FRACTIONS or (
            function in (operator.add, operator.mul) and any(map(is_fraction, given))
        )
        meta.set_value(result, size_value(meta.value(like), expression, fraction))
        meta.inherit(result, like)
        return result

    def is_fraction(value: Any) -> bool:
        return isinstance(meta.value(value) if isinstance(value, Node) else value, float | torch.SymFloat)

    built: Node = visit(number)
    return built


def number_names(graph: Graph) -> None:
    """Call every operation by its kind and its number among those of this kind, in order.

    Names from a trace count what was made and dropped again on the way, which need not be the same in two processes.
    """
    inputs = {node.name for node in graph.nodes if node.op == "placeholder"}
    counts: dict[str, int] = {}
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        kind = _NUMBER.sub("", node.name)
        while True:
            count = counts[kind] = counts.get(kind, -1) + 1
            name = f"{kind}_{count}" if count else kind
            if name not in inputs:
                break
        node.name = name
