"""Functions that an operator takes, such as the mask of an attention.

A function is no node but an argument of the call that uses it: it goes wherever the call goes, and is gone with it. It
sees nothing but its own arguments; the operator is given what else it needs, behind the function.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_aggregate, map_arg

from graphcomp.ir import meta
from graphcomp.ir.normalize import number_names

_SCALAR = torch.ops.aten.scalar_tensor.default
DETACHED = torch.ops.aten.detach_.default
"""What `torch.tensor` does with what it has made; it changes no value."""
_aten = torch.ops.aten
_SAME = {
    *(DETACHED, _aten.lift_fresh_copy.default),
    *(_aten.detach.default, _aten.detach_copy.default, _aten.alias.default, _aten.alias_copy.default),
}
"""Operations whose result is their argument; a loop over all scores runs some of them one by one."""


@dataclass(frozen=True, eq=False)
class Body:
    """A function as a graph: placeholders, calls, one output, whose argument is what it returns. It is never changed.

    Two that compute the same in the same way are equal.
    """

    graph: Graph

    def __call__(self, *given: Any) -> Any:
        return self.module(*given)

    @cached_property
    def module(self) -> GraphModule:
        """For whoever takes functions only as modules."""
        copy = Graph()
        copy.output(copy.graph_copy(self.graph, {}))
        return GraphModule(torch.nn.Module(), copy, class_name="body")

    @property
    def inputs(self) -> list[Node]:
        return self.graph.find_nodes(op="placeholder")

    @property
    def calls(self) -> list[Node]:
        return [node for node in self.graph.nodes if node.op not in ("placeholder", "output")]

    @property
    def returned(self) -> Any:
        """The node, or the list of nodes and Nones, that it returns."""
        return self.graph.output_node().args[0]

    @cached_property
    def _key(self) -> tuple[Any, ...]:
        places = {node: f"%{place}" for place, node in enumerate(self.graph.nodes)}

        def place(node: Node) -> Any:
            return _Place(places[node])

        def key(node: Node) -> tuple[Any, ...]:
            args, kwargs = map_arg((node.args, node.kwargs), place)
            found = meta.tensor(node)
            form = None if found is None else (found.dtype, *map(str, found.shape))
            return node.op, node.target if node.op == "call_function" else "", repr(args), repr(kwargs), form

        return tuple(map(key, self.graph.nodes))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Body) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)


@dataclass(frozen=True)
class _Place:
    text: str

    def __repr__(self) -> str:
        return self.text


def bodies_of(node: Node) -> list[Body]:
    """The functions among the arguments of a call, in order."""
    found: list[Body] = []
    map_aggregate((node.args, node.kwargs), lambda part: found.append(part) if isinstance(part, Body) else None)
    return found


def take_up(module: GraphModule) -> None:
    """Put the functions that a traced graph holds as modules where they are used."""
    for node in module.graph.find_nodes(op="get_attr"):
        held = getattr(module, str(node.target))
        if isinstance(held, GraphModule):
            _replace(node, Body(_graph(held)))


def with_modules(graph: Graph) -> torch.nn.Module:
    """Have the calls of a graph take modules in the place of functions; returns what holds these."""
    holder, names = torch.nn.Module(), dict[Body, str]()
    for node in list(graph.nodes):
        held: dict[Body, Node] = {}
        for body in dict.fromkeys(bodies_of(node)):
            name = names.setdefault(body, f"body_{len(names)}")
            if not hasattr(holder, name):
                holder.add_module(name, body.module)
            with graph.inserting_before(node):
                held[body] = graph.create_node("get_attr", name)
        if held:
            _exchange(node, held)
    return holder


def _exchange(node: Node, held: dict[Body, Node]) -> None:
    def swap(part: Any) -> Any:
        return held[part] if isinstance(part, Body) else part

    node.args, node.kwargs = map_aggregate(node.args, swap), map_aggregate(node.kwargs, swap)


def _replace(node: Node, body: Body) -> None:
    def swap(argument: Node) -> Any:
        return body if argument is node else argument

    for user in list(node.users):
        user.args, user.kwargs = map_arg(user.args, swap), map_arg(user.kwargs, swap)
    node.graph.erase_node(node)


def _graph(module: GraphModule) -> Graph:
    """A copy with names that do not depend on the trace. Numbers that are tensors without dimensions are literals."""
    graph, copies = Graph(), dict[Node, Node]()
    for place, node in enumerate(module.graph.nodes):
        if node.op == "placeholder":
            copies[node] = graph.placeholder(f"arg{place}")
        elif node.op == "get_attr":
            literal = getattr(module, str(node.target))
            kind = {"dtype": literal.dtype, "device": literal.device}
            copies[node] = graph.create_node("call_function", _SCALAR, (literal.item(),), kind, "scalar_tensor")
        elif node.target in _SAME:
            copies[node] = copies[node.args[0]]  # nothing here writes to memory
            continue
        elif node.op == "output":
            graph.output(map_arg(node.args[0], copies.__getitem__))
            continue
        else:
            copies[node] = graph.node_copy(node, copies.__getitem__)
        copies[node].meta.clear()
        meta.set_value(copies[node], meta.value(node))
    graph.eliminate_dead_code()
    number_names(graph)
    return graph
