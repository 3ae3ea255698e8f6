"""Collectives begin early and are waited for late, in an order that follows from the program alone."""

from __future__ import annotations

import pytest
import torch
from expecttest import TestCase
from torch.fx import Node

from graphcomp.compat import collective_operators as ops
from graphcomp.errors import PlanError
from graphcomp.ir import signature as role
from graphcomp.ir.collective_calls import is_start, is_wait
from graphcomp.ir.lockstep import lockstep
from graphcomp.ir.meta import Note, Phase
from graphcomp.ir.printer import print_program
from graphcomp.ir.program import Level, Program
from graphcomp.passes.manager import PassManager
from graphcomp.passes.order_collectives import OrderCollectives
from graphcomp.passes.pipeline import parse_pipeline
from tests.ir.build import Builder, aten


def start() -> tuple[Builder, list[Node]]:
    b = Builder()
    b.note = Note(Phase.BACKWARD)
    return b, [b.input(role.Grad(name), (4,), name) for name in "xyz"]


def one_by_one() -> Program:
    b, inputs = start()
    results: dict[role.Role, Node | None] = {}
    for name, node in zip("xyz", inputs, strict=True):
        packed = b.call(aten.neg.default, node)
        waited = b.call(ops.WAIT, b.call(ops.ALL_REDUCE, packed, "sum", "dp"))
        results[role.Grad(name)] = b.call(aten.exp.default, waited)
    return b.program(results, level=Level.STEP)


def ordered(program: Program, under_way: int = 2) -> Program:
    return PassManager([OrderCollectives(under_way)]).run(program)


def names(program: Program, under_way: int = 2) -> list[str]:
    return [node.name for node in ordered(program, under_way).calls()]


class TestText(TestCase):
    maxDiff = None

    def test_before(self) -> None:
        self.assertExpectedInline(
            print_program(one_by_one(), groups={"dp": "dp"}),
            """\
step program "sample"
  %x: f32[4] = grad x
  %y: f32[4] = grad y
  %z: f32[4] = grad z
backward:
  %neg: f32[4] = neg(%x)
  %all_reduce: f32[4] = _c10d_functional.all_reduce(%neg, 'sum', dp)
  %wait_tensor: f32[4] = _c10d_functional.wait_tensor(%all_reduce)
  %exp: f32[4] = exp(%wait_tensor)
  %neg_1: f32[4] = neg(%y)
  %all_reduce_1: f32[4] = _c10d_functional.all_reduce(%neg_1, 'sum', dp)
  %wait_tensor_1: f32[4] = _c10d_functional.wait_tensor(%all_reduce_1)
  %exp_1: f32[4] = exp(%wait_tensor_1)
  %neg_2: f32[4] = neg(%z)
  %all_reduce_2: f32[4] = _c10d_functional.all_reduce(%neg_2, 'sum', dp)
  %wait_tensor_2: f32[4] = _c10d_functional.wait_tensor(%all_reduce_2)
  %exp_2: f32[4] = exp(%wait_tensor_2)
return grad x = %exp
return grad y = %exp_1
return grad z = %exp_2
""",
        )

    def test_after(self) -> None:
        self.assertExpectedInline(
            print_program(ordered(one_by_one()), groups={"dp": "dp"}),
            """\
step program "sample"
  %x: f32[4] = grad x
  %y: f32[4] = grad y
  %z: f32[4] = grad z
backward:
  %neg: f32[4] = neg(%x)
  %all_reduce: f32[4] = _c10d_functional.all_reduce(%neg, 'sum', dp)
  %neg_1: f32[4] = neg(%y)
  %all_reduce_1: f32[4] = _c10d_functional.all_reduce(%neg_1, 'sum', dp)
  %wait_tensor: f32[4] = _c10d_functional.wait_tensor(%all_reduce)
  %exp: f32[4] = exp(%wait_tensor)
  %neg_2: f32[4] = neg(%z)
  %all_reduce_2: f32[4] = _c10d_functional.all_reduce(%neg_2, 'sum', dp)
  %wait_tensor_1: f32[4] = _c10d_functional.wait_tensor(%all_reduce_1)
  %exp_1: f32[4] = exp(%wait_tensor_1)
  %wait_tensor_2: f32[4] = _c10d_functional.wait_tensor(%all_reduce_2)
  %exp_2: f32[4] = exp(%wait_tensor_2)
return grad x = %exp
return grad y = %exp_1
return grad z = %exp_2
""",
        )


def test_results_are_the_same() -> None:
    program = one_by_one()
    inputs = [[torch.randn(4) for _ in range(3)] for _ in range(2)]
    expected, found = (lockstep(each, "dp", [list(box) for box in inputs]) for each in (program, ordered(program)))
    for one, other in zip(expected, found, strict=True):
        assert all(map(torch.equal, one, other))


def test_starts_are_in_the_order_of_first_use() -> None:
    """x begins first, y is needed first; z is only returned, and so needed last."""
    b, (x, y, z) = start()
    z = b.call(ops.WAIT, b.call(ops.REDUCE_SCATTER, z, "sum", 2, "dp"))
    x, y = (b.call(ops.WAIT, b.call(ops.ALL_REDUCE, node, "sum", "dp")) for node in (x, y))
    first, second = b.call(aten.exp.default, y), b.call(aten.sin.default, x)
    program = b.program({role.Grad("x"): second, role.Grad("y"): first, role.Grad("z"): z}, level=Level.STEP)
    starts = ["all_reduce_1", "all_reduce", "reduce_scatter_tensor"]
    assert names(program, under_way=3) == [*starts, "wait_tensor_2", "exp", "wait_tensor_1", "sin", "wait_tensor"]


def most_under_way(program: Program) -> int:
    now, most = set(), 0
    for node in program.calls():
        if is_start(node):
            now.add(node)
            most = max(most, len(now))
        elif is_wait(node):
            now.remove(node.args[0])
    return most


@pytest.mark.parametrize("under_way", [1, 2, 3, 7])
def test_no_more_are_under_way_than_allowed(under_way: int) -> None:
    b, (x, *_) = start()
    results: dict[role.Role, Node | None] = {}
    for place in range(6):
        packed = b.call(aten.mul.Tensor, x, place)
        waited = b.call(ops.WAIT, b.call(ops.REDUCE_SCATTER, packed, "sum", 2, "dp"))
        results[role.Grad(str(place))] = b.call(aten.exp.default, waited)
    program = ordered(b.program(results, level=Level.STEP), under_way)
    assert most_under_way(program) == min(under_way, 6)
    calls = program.calls()
    starts = [place for place, node in enumerate(calls) if is_start(node)]
    for early, late in zip(program.results, starts[under_way:], strict=False):
        assert early is not None and calls.index(early) < late  # what follows is computed, so the memory is free


def test_what_needs_two_results_makes_neither_begin_early() -> None:
    b, inputs = start()
    x, y, z = (b.call(ops.WAIT, b.call(ops.ALL_REDUCE, node, "sum", "dp")) for node in inputs)
    exp, sin = b.call(aten.exp.default, x), b.call(aten.sin.default, y)
    both = b.call(aten.add.Tensor, exp, z)
    program = b.program({role.Grad("x"): both, role.Grad("y"): sin}, level=Level.STEP)
    assert names(program, under_way=1) == [
        "all_reduce",
        "wait_tensor",
        "exp",
        "all_reduce_1",
        "wait_tensor_1",
        "sin",
        "all_reduce_2",
        "wait_tensor_2",
        "add",
    ]


def test_text_of_the_pipeline_and_its_option() -> None:
    assert parse_pipeline("order_collectives") == [OrderCollectives(2)]
    (only,) = parse_pipeline("order_collectives{under_way=3}")
    assert (only, str(only)) == (OrderCollectives(3), "order_collectives{under_way=3}")
    for wrong in (0, -1, True, 1.5):
        with pytest.raises(PlanError, match="the most collectives under way at a time"):
            OrderCollectives(wrong)  # type: ignore[arg-type]
