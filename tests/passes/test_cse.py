"""Merging of equal computations, and what must not be merged."""

from __future__ import annotations

import operator
from dataclasses import replace

import pytest
import torch
from expecttest import TestCase

from graphcomp.ir.meta import Note, Phase
from graphcomp.ir.printer import print_program
from graphcomp.ir.program import Level, Program
from graphcomp.passes.cse import CommonSubexpressions
from tests.ir.build import aten
from tests.passes.running import assert_same
from tests.passes.test_noop import Start, given


def sample() -> Program:
    b = Start()
    one, two = (b.call(aten.sin.default, b.x) for _ in range(2))
    both = b.call(aten.add.Tensor, b.call(aten.cos.default, one), b.call(aten.cos.default, two))
    b.note = Note(Phase.BACKWARD)
    numbers = [b.call(operator.mul, b.rows, b.columns) for _ in range(2)]
    views = [b.call(aten.view.default, both, [number]) for number in numbers]
    return b.finish(b.call(aten.add.Tensor, b.call(aten.exp.default, views[0]), b.call(aten.exp.default, views[1])))


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
  %sin: f32[s0, s1] = sin(%x)
  %sin_1: f32[s0, s1] = sin(%x)
  %cos: f32[s0, s1] = cos(%sin)
  %cos_1: f32[s0, s1] = cos(%sin_1)
  %add: f32[s0, s1] = add.Tensor(%cos, %cos_1)
backward:
  %mul: int s0*s1 = %s0 * %s1
  %mul_1: int s0*s1 = %s0 * %s1
  %view: f32[s0*s1] = view(%add, [%mul])
  %view_1: f32[s0*s1] = view(%add, [%mul_1])
  %exp: f32[s0*s1] = exp(%view)
  %exp_1: f32[s0*s1] = exp(%view_1)
  %add_1: f32[s0*s1] = add.Tensor(%exp, %exp_1)
return output 0 = %add_1
""",
        )
        self.assertExpectedInline(
            print_program(CommonSubexpressions().apply(sample())),
            """\
joint program "sample"
  %x: f32[s0, s1] = batch x
  %s0: int = size s0
  %s1: int = size s1
forward:
  %sin: f32[s0, s1] = sin(%x)
  %cos: f32[s0, s1] = cos(%sin)
  %add: f32[s0, s1] = add.Tensor(%cos, %cos)
backward:
  %mul: int s0*s1 = %s0 * %s1
  %view: f32[s0*s1] = view(%add, [%mul])
  %exp: f32[s0*s1] = exp(%view)
  %add_1: f32[s0*s1] = add.Tensor(%exp, %exp)
return output 0 = %add_1
""",
        )


def test_meaning() -> None:
    program = sample()
    assert_same(program, CommonSubexpressions().apply(program.copy()), given(program))


def merges(first: Note, second: Note, level: Level = Level.JOINT) -> bool:
    """Whether two sines under these annotations become one."""
    b = Start()
    b.note = first
    one = b.call(aten.sin.default, b.x)
    b.note = second
    two = b.call(aten.sin.default, b.x)
    program = b.finish(b.call(aten.add.Tensor, one, two))
    program.level = level
    return len(CommonSubexpressions().apply(program).calls()) == 2


PLAIN = Note(Phase.FORWARD, "layer")


@pytest.mark.parametrize(
    "other",
    [{"phase": Phase.LOSS}, {"phase": Phase.BACKWARD}, {"recompute": 1}, {"module": "other"}],
    ids=str,
)
def test_places_that_are_kept_apart(other: dict[str, object]) -> None:
    assert merges(PLAIN, PLAIN)
    assert not merges(PLAIN, replace(PLAIN, **other))  # type: ignore[arg-type]


def test_regions_of_one_number_merge_and_modules_of_one_stage_do() -> None:
    assert merges(replace(PLAIN, recompute=2), replace(PLAIN, recompute=2))
    assert not merges(replace(PLAIN, recompute=1), replace(PLAIN, recompute=2))
    assert merges(PLAIN, replace(PLAIN, module="other"), Level.STAGE)


def test_random_operations_stay_two_draws() -> None:
    b = Start()
    one, two = (b.call(aten.bernoulli.p, b.x, 0.5) for _ in range(2))
    program = b.finish(b.call(aten.add.Tensor, one, two))
    assert len(CommonSubexpressions().apply(program).calls()) == 3


def test_outputs_never_come_to_share_memory() -> None:
    b = Start()
    one, two = (b.call(aten.sin.default, b.x) for _ in range(2))
    program = CommonSubexpressions().apply(b.finish(one, b.call(aten.t.default, two)))
    assert len(program.calls()) == 3


@pytest.mark.parametrize("values", [(1, 1.0), (1, True), (0.0, -0.0)], ids=str)
def test_arguments_that_python_calls_equal_are_told_apart(values: tuple[object, object]) -> None:
    b = Start()
    one, two = (b.call(aten.mul.Tensor, b.x, value) for value in values)
    program = b.finish(b.call(aten.add.Tensor, b.call(torch.ops.aten.exp.default, one), two))
    assert len(CommonSubexpressions().apply(program).calls()) == 4
