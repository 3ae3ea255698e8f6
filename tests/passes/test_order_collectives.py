"""Collectives begin early and are waited for late, in an order that follows from the program alone."""

from __future__ import annotations

import torch
from expecttest import TestCase
from torch.fx import Node

from graphcomp.compat import collective_operators as ops
from graphcomp.ir import signature as role
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


def ordered(program: Program) -> Program:
    return PassManager([OrderCollectives()]).run(program)


def names(program: Program) -> list[str]:
    return [node.name for node in ordered(program).calls()]


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
  %neg_2: f32[4] = neg(%z)
  %all_reduce_2: f32[4] = _c10d_functional.all_reduce(%neg_2, 'sum', dp)
  %wait_tensor: f32[4] = _c10d_functional.wait_tensor(%all_reduce)
  %exp: f32[4] = exp(%wait_tensor)
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
    assert names(program) == [*starts, "wait_tensor_2", "exp", "wait_tensor_1", "sin", "wait_tensor"]


def test_a_start_that_needs_another_result_comes_behind_its_wait() -> None:
    b, (x, y, _) = start()
    summed = b.call(ops.WAIT, b.call(ops.ALL_REDUCE, x, "sum", "dp"))
    scaled = b.call(aten.exp.default, summed)
    gathered = b.call(ops.WAIT, b.call(ops.ALL_GATHER, scaled, 2, "dp"))
    other = b.call(ops.WAIT, b.call(ops.ALL_REDUCE, y, "sum", "dp"))
    results = {role.Grad("x"): b.call(aten.sin.default, gathered), role.Grad("y"): b.call(aten.cos.default, other)}
    assert names(b.program(results, level=Level.STEP)) == [
        "all_reduce",
        "wait_tensor",
        "exp",
        "all_gather_into_tensor",
        "all_reduce_1",
        "wait_tensor_1",
        "sin",
        "wait_tensor_2",
        "cos",
    ]


def test_a_result_that_nobody_reads_is_still_waited_for() -> None:
    b, (x, y, _) = start()
    b.call(ops.WAIT, b.call(ops.ALL_REDUCE, x, "sum", "dp"))
    used = b.call(ops.WAIT, b.call(ops.ALL_REDUCE, y, "sum", "dp"))
    program = b.program({role.Grad("y"): b.call(aten.exp.default, used)}, level=Level.STEP)
    assert names(program) == ["all_reduce_1", "all_reduce", "wait_tensor_1", "exp", "wait_tensor"]


def test_text_of_the_pipeline() -> None:
    assert parse_pipeline("order_collectives") == [OrderCollectives()]
