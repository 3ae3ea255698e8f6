"""Cut a set of nodes out of a graph, as a program of its own with typed inputs and outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import sympy
import torch
from torch.fx import Graph, Node

from graphcomp.ir import meta, spelling
from graphcomp.ir.program import Level, Program
from graphcomp.ir.signature import Constant, Role, Size


def extract(
    joint: Program,
    name: str,
    nodes: Iterable[Node],
    given: dict[Node, Role],
    results: Sequence[tuple[Role, Node | None]],
    *,
    computes: Callable[[Node], bool],
    level: Level = Level.STAGE,
) -> Program:
    """A program that runs `nodes` and whatever replicable nodes they need.

    given: nodes whose values come in from outside, with their roles, in the order of the inputs.
    computes: whether a node that is not given may be copied into the program when one of its users needs it.
    Ambient inputs of the joint program (parameters, batch, sizes, ...) that are needed become inputs, first.
    """
    ambient = {node: what for what, node in joint.input_nodes()}
    needed = _needed(nodes, [node for _, node in results if node is not None], given, ambient, computes)
    graph = Graph()
    copies: dict[Node, Node] = {}
    inputs: list[Role] = []

    def place_input(node: Node, what: Role) -> None:
        copy = graph.placeholder(node.name)
        copy.meta = dict(node.meta)
        copies[node] = copy
        inputs.append(what)

    for node, what in ambient.items():
        if node in needed:
            place_input(node, what)
    for symbol, number in _missing_sizes(needed, given, ambient).items():
        meta.set_value(graph.placeholder(symbol), number)
        inputs.append(Size(symbol))
    for node, what in given.items():
        place_input(node, what)
    for node in joint.graph.nodes:
        if node in needed and node not in copies:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] if node is not None else None for _, node in results))
    constants = {what.name: joint.constants[what.name] for what in inputs if isinstance(what, Constant)}
    return Program(name, level, graph, tuple(inputs), tuple(what for what, _ in results), joint.fake_mode, constants)


def _missing_sizes(
    needed: set[Node], given: Mapping[Node, Role], ambient: Mapping[Node, Role]
) -> dict[str, torch.SymInt]:
    """The sizes that values of a program are made of and that none of its inputs shows, by symbol.

    Such as the length of a batch field of another stage, of which only a function (after a convolution) arrives.
    """
    values = (meta.value(node) for node in (*needed, *given))
    used = {str(symbol) for value in values for symbol in spelling.free_symbols(value)}
    missing = sorted(used - _shown([*(needed & ambient.keys()), *given]).keys())
    everywhere = _shown(ambient) if missing else {}
    return {symbol: everywhere[symbol] for symbol in missing if symbol in everywhere}


def _shown(inputs: Iterable[Node]) -> dict[str, torch.SymInt]:
    """The symbols that are inputs themselves or a dimension of one, with their values."""
    found: dict[str, torch.SymInt] = {}
    for node in inputs:
        value = meta.value(node)
        for number in value.shape if isinstance(value, torch.Tensor) else (value,):
            if isinstance(number, torch.SymInt) and isinstance(spelling.expression(number), sympy.Symbol):
                found.setdefault(str(spelling.expression(number)), number)
    return found


def _needed(
    nodes: Iterable[Node],
    results: Iterable[Node],
    given: dict[Node, Role],
    ambient: dict[Node, Role],
    computes: Callable[[Node], bool],
) -> set[Node]:
    found: set[Node] = set()
    pending = [*nodes, *(node for node in results if node not in given)]
    while pending:
        node = pending.pop()
        if node in found or node in given:
            continue
        if node not in ambient and not computes(node):
            raise KeyError(f"{node.name} ({meta.note(node)}) is neither given nor computed here")
        found.add(node)
        pending.extend(node.all_input_nodes)
    return found
