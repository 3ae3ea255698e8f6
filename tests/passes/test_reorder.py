"""Orders of a graph in which every value stands before its uses."""

from __future__ import annotations

import random

from torch.fx import Node

from graphcomp.ir.program import Program
from graphcomp.ir.signature import BatchLeaf, Output
from graphcomp.ir.verify import verify
from graphcomp.passes.reorder import reorder
from tests.ir.build import Builder, aten


def sample() -> tuple[Program, dict[str, Node]]:
    """d = (sin x) + (cos x), e = exp x, both returned; f = neg d unused."""
    b = Builder()
    x = b.input(BatchLeaf("x"), b.leaf, "x")
    a, c = b.call(aten.sin.default, x), b.call(aten.cos.default, x)
    d, e = b.call(aten.add.Tensor, a, c), b.call(aten.exp.default, x)
    b.call(aten.neg.default, d)
    program = b.program({Output("e"): e, Output("d"): d})
    return program, {node.name: node for node in program.calls()}


def order(program: Program) -> list[str]:
    return [node.name for node in program.calls()]


def test_as_it_stands() -> None:
    program, _ = sample()
    reorder(program)
    assert order(program) == ["sin", "cos", "add", "exp", "neg"]


def test_early_nodes_come_first_behind_what_they_need() -> None:
    program, nodes = sample()
    reorder(program, early=[nodes["exp"], nodes["neg"]])
    assert order(program) == ["exp", "sin", "cos", "add", "neg"]


def test_late_nodes_wait_for_the_first_use() -> None:
    program, _ = sample()
    reorder(program, late=lambda node: node.name in ("sin", "add", "exp", "neg"))
    # The results, in their order, need exp, then add; nothing needs neg.
    assert order(program) == ["cos", "exp", "sin", "add", "neg"]


def test_values_come_to_stand_before_their_uses() -> None:
    program, nodes = sample()
    nodes["sin"].prepend(nodes["add"])  # as after a rewrite that put a node too early
    reorder(program)
    verify(program)
    assert order(program) == ["sin", "cos", "add", "exp", "neg"]


def test_a_long_chain_takes_no_recursion() -> None:
    b = Builder()
    node = b.input(BatchLeaf("x"), b.leaf, "x")
    for _ in range(3000):
        node = b.graph.call_function(aten.sin.default, (node,))
    program = b.program({Output("y"): node})
    calls = program.calls()
    for call in random.Random(0).sample(calls, len(calls)):
        program.output_node.prepend(call)
    reorder(program, late=lambda call: True)
    assert program.calls() == calls


def test_random_operations_keep_their_order() -> None:
    b = Builder()
    x = b.input(BatchLeaf("x"), b.leaf, "x")
    first, second = b.call(aten.bernoulli.p, x, 0.5), b.call(aten.bernoulli.p, x, 0.5)
    program = b.program({Output("a"): first, Output("b"): second})
    reorder(program, early=[second])
    assert program.calls() == [first, second]
