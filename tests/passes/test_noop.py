"""Operations that give back what they were given."""

from __future__ import annotations

import pytest
import torch
from expecttest import TestCase
from torch.fx import Node

from graphcomp.ir import signature as role
from graphcomp.ir.printer import print_program
from graphcomp.ir.program import Program
from graphcomp.passes.dead_code import DeadCode
from graphcomp.passes.noop import NoOp
from tests.ir.build import Builder, aten
from tests.passes.running import assert_same


class Start(Builder):
    """One leaf x of shape (s0, s1) with both sizes."""

    def __init__(self) -> None:
        super().__init__(example=(6, 8))
        self.x = self.input(role.BatchLeaf("x"), self.leaf, "x")
        self.rows, self.columns = self.size(0), self.size(1)

    def finish(self, *results: Node) -> Program:
        return self.program({role.Output(str(i)): result for i, result in enumerate(results)})


def given(program: Program) -> dict[role.Role, object]:
    symbols = [what for what in program.inputs if isinstance(what, role.Size)]
    x = torch.randn(5, 3)
    x[0, 0] = -0.0
    return {role.BatchLeaf("x"): x, **dict(zip(symbols, x.shape, strict=True))}


def sample() -> Program:
    b = Start()
    there = b.call(aten.t.default, b.x)
    back = b.call(aten.t.default, there)
    copy = b.call(aten.clone.default, back)
    same = b.call(aten.view.default, copy, [b.rows, b.columns])
    part = b.call(aten.slice.Tensor, same, 0, 0, 9223372036854775807)
    one = b.call(aten.mul.Tensor, part, 1)
    sine = b.call(aten.sin.default, one)
    flat = b.call(aten.view.default, sine, [-1])
    again = b.call(aten.view.default, flat, [b.columns, b.rows])
    return b.finish(b.call(aten.cos.default, again))


class TestText(TestCase):
    maxDiff = None

    def test_before_and_after(self) -> None:
        self.assertExpectedInline(
            print_program(sample()),
            """\
joint program "sample"
  %x: f32[s0, s1] = batch x
  %s0: int = size s0
  %s1: int = size s1
forward:
  %t: f32[s1, s0] = t(%x)
  %t_1: f32[s0, s1] = t(%t)
  %clone: f32[s0, s1] = clone(%t_1)
  %view: f32[s0, s1] = view(%clone, [%s0, %s1])
  %slice_1: f32[s0, s1] = slice.Tensor(%view, 0, 0, 9223372036854775807)
  %mul: f32[s0, s1] = mul.Tensor(%slice_1, 1)
  %sin: f32[s0, s1] = sin(%mul)
  %view_1: f32[s0*s1] = view(%sin, [-1])
  %view_2: f32[s1, s0] = view(%view_1, [%s1, %s0])
  %cos: f32[s1, s0] = cos(%view_2)
return output 0 = %cos
""",
        )
        self.assertExpectedInline(
            print_program(DeadCode().apply(NoOp().apply(sample()))),
            """\
joint program "sample"
  %x: f32[s0, s1] = batch x
  %s0: int = size s0
  %s1: int = size s1
forward:
  %sin: f32[s0, s1] = sin(%x)
  %view_2: f32[s1, s0] = view(%sin, [%s1, %s0])
  %cos: f32[s1, s0] = cos(%view_2)
return output 0 = %cos
""",
        )


def test_meaning() -> None:
    program = sample()
    assert_same(program, NoOp().apply(program.copy()), given(program))


def kept(program: Program) -> bool:
    before = print_program(program)
    after = NoOp().apply(program.copy())
    assert_same(program, after, given(program))
    return print_program(after) == before


def test_adding_zero_is_kept_for_it_changes_negative_zero() -> None:
    b = Start()
    assert kept(b.finish(b.call(aten.add.Tensor, b.x, 0)))


def test_arithmetic_that_changes_the_dtype_is_kept() -> None:
    b = Start()
    whole = b.call(aten._to_copy.default, b.x, dtype=torch.int64)
    assert kept(b.finish(b.call(aten.sin.default, b.call(aten.mul.Tensor, whole, 1.0))))


def test_a_copy_that_is_an_output_or_seen_through_one_is_kept() -> None:
    b = Start()
    copy = b.call(aten.clone.default, b.x)
    assert kept(b.finish(copy))
    b = Start()
    copy = b.call(aten.clone.default, b.x)
    assert kept(b.finish(b.call(aten.t.default, copy)))


def test_a_copy_that_changes_the_strides_is_kept() -> None:
    b = Start()
    turned = b.call(aten.t.default, b.x)
    dense = b.call(aten.clone.default, turned, memory_format=torch.contiguous_format)
    assert kept(b.finish(b.call(aten.sin.default, b.call(aten.view.default, dense, [-1]))))


def test_views_that_show_something_else_are_kept() -> None:
    b = Start()
    assert kept(b.finish(b.call(aten.t.default, b.call(aten.slice.Tensor, b.x, 0, 1, 3))))


def test_reshapes_of_something_not_dense_stay_two() -> None:
    b = Start()
    wide = b.call(aten.expand.default, b.call(aten.unsqueeze.default, b.x, 0), [2, b.rows, b.columns])
    split = b.call(aten.view.default, wide, [2, b.rows, b.columns, 1])
    assert kept(b.finish(b.call(aten.sin.default, b.call(aten.view.default, split, [2, b.rows, 1, b.columns]))))


@pytest.mark.parametrize("target", [aten.detach.default, aten.alias.default])
def test_no_guard_is_added(target: torch._ops.OpOverload) -> None:
    b = Start()
    program = b.finish(b.call(aten.sin.default, b.call(target, b.x)))
    before = len(b.mode.shape_env.guards)
    assert len(NoOp().apply(program).calls()) == 1
    assert len(b.mode.shape_env.guards) == before
