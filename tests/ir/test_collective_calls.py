"""Collectives of a graph are read by name, and get the groups of a process in place of mesh axes."""

from __future__ import annotations

import pytest
from torch.fx import Graph, Node

from graphcomp.compat import collective_operators as ops
from graphcomp.errors import VerifyError
from graphcomp.ir.calls import arguments
from graphcomp.ir.collective_calls import axis_of, is_start, is_wait, name_groups
from tests.ir.build import aten


def reduced(axis: str, by_name: bool = False) -> tuple[Graph, Node]:
    graph = Graph()
    x = graph.placeholder("x")
    given = ((x, "sum"), {"group_name": axis}) if by_name else ((x, "sum", axis), {})
    node = graph.call_function(ops.ALL_REDUCE, *given)
    graph.output((graph.call_function(aten.relu.default, (graph.call_function(ops.WAIT, (node,)),)),))
    return graph, node


@pytest.mark.parametrize("by_name", [False, True])
def test_what_a_call_is(by_name: bool) -> None:
    graph, node = reduced("dp", by_name)
    x, _, wait, relu, _ = graph.nodes
    assert [is_start(n) for n in graph.nodes] == [False, True, False, False, False]
    assert [is_wait(n) for n in graph.nodes] == [False, False, True, False, False]
    assert (axis_of(node), axis_of(wait), axis_of(relu)) == ("dp", None, None)
    assert arguments(node) == {"input": x, "reduce_op": "sum", "group_name": "dp"}
    assert list(arguments(node, {x: 3.0}.__getitem__)) == ["input", "reduce_op", "group_name"]
    assert arguments(node, {x: 3.0}.__getitem__)["input"] == 3.0


@pytest.mark.parametrize("by_name", [False, True])
def test_axes_become_groups(by_name: bool) -> None:
    graph, node = reduced("dp", by_name)
    name_groups(graph, {"dp": "17", "pp": "4"}, "here")
    assert axis_of(node) == "17"


def test_another_group_stays() -> None:
    graph, node = reduced("41")
    name_groups(graph, {"dp": "17"}, "here")
    assert axis_of(node) == "41"


def test_an_axis_without_group_is_refused() -> None:
    graph, _ = reduced("tp")
    with pytest.raises(VerifyError, match="'all_reduce_default' runs over mesh axis 'tp', which has no") as caught:
        name_groups(graph, {"dp": "17"}, "program 'p'")
    assert (caught.value.where, caught.value.expected, caught.value.got) == ("program 'p'", "dp", "tp")
