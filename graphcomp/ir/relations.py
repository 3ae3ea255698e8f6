"""What code needs of sizes known at run time only goes to where they are read, which checks it whenever it reads.

h[mask] + others    ->    read_sum(mask, [%s0, %s1], "0 <= n0 | n0 <= s0 | n0 == s1"), a line each
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

import sympy
from torch.fx import Graph, Node

from graphcomp.compat.host_functions import text_of
from graphcomp.compat.relations import Relation, parsed
from graphcomp.compat.run_time_sizes import symbol_of
from graphcomp.errors import CaptureError
from graphcomp.ir import meta
from graphcomp.ir.calls import arguments
from graphcomp.ir.effects import reads_numbers
from graphcomp.ir.readable import readable


def check_where_read(
    graph: Graph,
    relations: Mapping[sympy.Basic, str | None],
    sizes: Mapping[str, Node],
    names: Mapping[str, str],
) -> None:
    """Give each relation to the last of the calls that read its numbers.

    relations: over symbols as the trace made them, each with the user's line. sizes: the inputs that give the others.
    names: what the user calls these.

    Raises CaptureError for one about a number that nobody reads.
    """
    read: dict[str, tuple[Node, int]] = {}
    for node in filter(reads_numbers, graph.nodes):
        numbers: Any = meta.value(node)
        for place, number in enumerate(numbers):
            if symbol_of(number) is not None:
                read.setdefault(str(symbol_of(number)), (node, place))
    order = {node: place for place, node in enumerate(graph.nodes)}
    for relation, line in relations.items():
        symbols = sorted(map(str, relation.free_symbols))
        if not read.keys() & set(symbols) or not {*read, *sizes}.issuperset(symbols):
            raise CaptureError(
                "the code relies on a size that is known only when the program runs",
                where=line,
                expected="sizes that follow from the batch, and numbers read out of tensors",
                got=f"it fits together only if {readable(relation, names)}",
                do="compute it from tensors in another way",
            )
        last = max((read[symbol][0] for symbol in symbols if symbol in read), key=order.__getitem__)
        given = arguments(last)
        others = list(given.get("sizes", ()))
        own, origins = {}, []
        for symbol in symbols:
            if symbol in read and read[symbol][0] is last:
                own[symbol] = f"n{read[symbol][1]}"
                continue
            source = sizes[symbol] if symbol in sizes else _number(graph, *read[symbol])
            if source not in others:
                others.append(source)
            own[symbol] = f"s{others.index(source)}"
            origins.append(f"{own[symbol]} is {names[symbol] if symbol in names else _origin(read[symbol][0])}")
        renamed = relation.xreplace({s: sympy.Symbol(own[str(s)], **s.assumptions0) for s in relation.free_symbols})
        known = ", where " + " and ".join(origins) if origins else ""
        checked = Relation(text_of(renamed), readable(renamed) + known, line or "")
        text = "\n".join(filter(None, (given.get("relations"), str(checked))))
        kept = {name: value for name, value in given.items() if name not in ("sizes", "relations")}
        last.args, last.kwargs = (*kept.values(), others, text), {}


def _origin(call: Node) -> str:
    source = meta.note(call).source
    return f"read at {PurePath(source).name}" if source else "a number that is read"


def _number(graph: Graph, call: Node, place: int) -> Node:
    """The node of a number that a call reads."""
    for user in call.users:
        if user.target is operator.getitem and user.args[1] == place:
            return user
    with graph.inserting_after(call):
        made = graph.call_function(operator.getitem, (call, place))
    meta.set_value(made, meta.value(call)[place])  # type: ignore[index]
    meta.inherit(made, call)
    return made


def is_checked(node: Node) -> bool:
    """Whether a call checks what code needs of the numbers it reads; of such a number, whether its call does."""
    call: Any = node.args[0] if node.target is operator.getitem else node
    if not isinstance(call, Node) or not reads_numbers(call):
        return False
    return any(one.readable for one in parsed(str(arguments(call).get("relations", ""))))
