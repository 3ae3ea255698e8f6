"""Names of operations do not depend on what a trace made and dropped."""

from __future__ import annotations

import torch
from torch.fx import Graph

from graphcomp.ir.normalize import number_names

aten = torch.ops.aten


def graph_of(dropped: int) -> Graph:
    """x, cos_1 -> sum of sines, with so many operations made and dropped before each that stays."""
    graph = Graph()
    x, y = graph.placeholder("x"), graph.placeholder("cos_1")

    def call(target: object, *args: object) -> torch.fx.Node:
        for _ in range(dropped):
            graph.erase_node(graph.call_function(target, args))
        return graph.call_function(target, args)

    a, b = call(aten.sin.default, x), call(aten.sin.default, y)
    c, d = call(aten.cos.default, a), call(aten.cos.default, b)
    graph.output((call(aten.add.Tensor, c, d),))
    return graph


def test_the_same_graph_has_the_same_names() -> None:
    names = []
    for dropped in (0, 1, 5):
        graph = graph_of(dropped)
        number_names(graph)
        graph.lint()
        names.append([node.name for node in graph.nodes])
    assert names[0] == names[1] == names[2]
    assert names[0] == [
        "x",
        "cos_1",
        "sin_default",
        "sin_default_1",
        "cos_default",
        "cos_default_1",
        "add_tensor",
        "output",
    ]


def test_an_inputs_name_is_not_taken() -> None:
    graph = Graph()
    x = graph.placeholder("neg_1")
    graph.output((graph.call_function(aten.neg.default, (graph.call_function(aten.neg.default, (x,), name="neg"),)),))
    for node in graph.nodes:
        if node.op == "call_function":
            node.name = node.name.replace("_default", "")
    number_names(graph)
    assert [node.name for node in graph.nodes] == ["neg_1", "neg", "neg_2", "output"]
