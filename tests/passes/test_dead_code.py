"""Removal of what no output needs."""

from __future__ import annotations

import torch
from expecttest import TestCase

from graphcomp.ir import meta
from graphcomp.ir import signature as role
from graphcomp.ir.meta import Note, Phase
from graphcomp.ir.printer import print_program
from graphcomp.ir.program import Program
from graphcomp.ir.verify import verify
from graphcomp.passes.dead_code import DeadCode
from tests.ir.build import Builder, aten
from tests.passes.running import assert_same
from tests.passes.test_noop import Start, given


def sample() -> Program:
    b = Start()
    y = b.input(role.Param("unused"), (8, 4), "y")
    b.call(aten.exp.default, b.call(aten.cos.default, y))
    return b.finish(b.call(aten.sin.default, b.x))


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
  %y: f32[8, 4] = param unused
forward:
  %cos: f32[8, 4] = cos(%y)
  %exp: f32[8, 4] = exp(%cos)
  %sin: f32[s0, s1] = sin(%x)
return output 0 = %sin
""",
        )
        self.assertExpectedInline(
            print_program(DeadCode().apply(sample())),
            """\
joint program "sample"
  %x: f32[s0, s1] = batch x
forward:
  %sin: f32[s0, s1] = sin(%x)
return output 0 = %sin
""",
        )


def test_meaning() -> None:
    program = sample()
    assert_same(program, DeadCode().apply(program.copy()), {role.Param("unused"): torch.ones(8, 4), **given(program)})


def test_unused_random_operations_stay_so_that_later_draws_stay() -> None:
    b = Start()
    b.call(aten.bernoulli.p, b.x, 0.5)
    program = b.finish(b.call(aten.bernoulli.p, b.x, 0.5))
    assert len(DeadCode().apply(program.copy()).calls()) == 2
    assert_same(program, DeadCode().apply(program.copy()), given(program))


def test_unused_constants_leave_the_program_too() -> None:
    b = Start()
    b.input(role.Constant("table"), (3,), "table")
    program = b.finish(b.call(aten.sin.default, b.x))
    program.constants = {"table": torch.ones(3)}
    assert not DeadCode().apply(program).constants


def test_a_size_that_no_input_shows_by_itself_stays() -> None:
    """The one tensor has twice the rows; its symbol is known from the size alone."""
    b = Builder(example=(6, 8))
    rows = b.size(0)
    with b.mode:
        doubled = torch.empty(b.sizes[0] * 2)
    x = b.input(role.BatchLeaf("x"), doubled, "x")
    program = DeadCode().apply(b.program({role.Output("0"): b.call(aten.sin.default, x)}))
    assert role.Size(str(meta.value(rows).node.expr)) in program.inputs
    verify(program)


def test_backward_nodes_of_an_operation_that_is_gone_have_no_twin() -> None:
    b = Start()
    b.note = Note(Phase.FORWARD, "layer", operation=4)
    b.call(aten.sin.default, b.x)
    b.note = Note(Phase.BACKWARD, "layer", operation=4)
    node = b.call(aten.cos.default, b.x)
    program = DeadCode().apply(b.finish(node))
    assert meta.note(program.calls()[0]) == Note(Phase.BACKWARD, "layer", operation=None)
