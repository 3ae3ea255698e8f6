"""Every rule of the verifier, tried on a program that breaks it and nothing else."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from expecttest import TestCase

from graphcomp.errors import VerifyError
from graphcomp.ir import meta
from graphcomp.ir.meta import Note, Phase
from graphcomp.ir.program import Level, Program
from graphcomp.ir.signature import (
    Activation,
    BatchLeaf,
    Buffer,
    BufferUpdate,
    Denominator,
    Grad,
    Loss,
    Metric,
    Output,
    Param,
    Saved,
    Seed,
    Shard,
    Size,
)
from graphcomp.ir.verify import RULES, verify
from tests.ir.build import Builder, aten, training_step

c10d = torch.ops._c10d_functional


def refused(program: Program) -> VerifyError:
    with pytest.raises(VerifyError) as caught:
        verify(program, "some pass")
    return caught.value


def rule_of(error: VerifyError) -> str:
    return str(error).partition("\n  rule '")[2].partition("'")[0]


def named(program: Program, name: str) -> Any:
    return next(node for node in program.graph.nodes if node.name == name)


class TestMessages(TestCase):
    maxDiff = None

    def test_order(self) -> None:
        program = training_step()
        mul, t = named(program, "mul"), named(program, "t")
        mul.args = (mul.args[0], t)
        self.assertExpectedInline(
            str(refused(program)),
            """\
'mul' uses 't' before it is computed
  where: joint program 'tiny', made by 'some pass', node %mul, train.py:3
  rule 'order': inputs, then calls, then one output; each value is computed before its use
      %s0: int = size s0
      %denominator: f32[] = denominator loss
      %mm: f32[s0, 4] = mm(%x, %w)                                                  # fc  model.py:10
      %relu: f32[s0, 4] = relu(%mm)                                                 # (root)  model.py:11
    > %mul: f32[s0, 4] = mul.Tensor(%relu, %t)                                      # train.py:3
      %sum_1: f32[] = sum(%mul)                                                     # train.py:3
      %full: i64[] = full([], %s0, dtype=i64, device=cpu)                           # train.py:3
      %full_like: f32[s0, 4] = full_like(%relu, 0.5)                                # train.py:3  of %mul
      %div: f32[s0, 4] = div.Tensor(%full_like, %denominator)                       # train.py:3  of %mul
  got: a node further down
  (see docs/errors.md#verifyerror)""",
        )

    def test_agreement(self) -> None:
        program = training_step()
        program.set_signature(program.inputs, (*program.outputs[:2], Grad("fc.weight")))
        program.output_node.args = ((*program.results[:2], named(program, "t")),)
        self.assertExpectedInline(
            str(refused(program)),
            """\
'grad fc.weight' differs from 'param fc.weight'
  where: joint program 'tiny', made by 'some pass', node %t, module 'fc', model.py:10
  rule 'agreement': values have the shape and dtype that their role asks for
      %full: i64[] = full([], %s0, dtype=i64, device=cpu)                           # train.py:3
      %full_like: f32[s0, 4] = full_like(%relu, 0.5)                                # train.py:3  of %mul
      %div: f32[s0, 4] = div.Tensor(%full_like, %denominator)                       # train.py:3  of %mul
      %threshold_backward: f32[s0, 4] = threshold_backward(%div, %relu, 0)          # (root)  model.py:11  of %relu
    > %t: f32[8, s0] = t(%x)                                                        # fc  model.py:10  of %mm
      %mm_1: f32[8, 4] = mm(%t, %threshold_backward)                                # fc  model.py:10  of %mm
      return loss loss = %sum_1
      return tokens loss = %full
      return grad fc.weight = %t
  expected: f32[8, 4]
  got: f32[8, s0]
  (see docs/errors.md#verifyerror)""",
        )

    def test_whole_program(self) -> None:
        program = training_step()
        program.set_signature(program.inputs[:-1], program.outputs)
        self.assertExpectedInline(
            str(refused(program)),
            """\
the program has 4 inputs and 3 input roles
  where: joint program 'tiny', made by 'some pass'
  rule 'signature': one role an input and one a result, each role once
  expected: 4
  got: param fc.weight, batch x, size s0
  (see docs/errors.md#verifyerror)""",
        )


def test_sound_programs_pass() -> None:
    verify(training_step())
    verify(training_step().copy())


# --- one broken program a line: (rule, what the message says, how it is broken) ---


def broken_step(change: Callable[[Program], None]) -> Callable[[], Program]:
    def make() -> Program:
        program = training_step()
        change(program)
        return program

    return make


def built(make: Callable[[Builder, Any], dict[Any, Any]], level: Level = Level.JOINT) -> Callable[[], Program]:
    """A program over the one input x: f32[s0, s1]; `make` adds to it and gives the outputs."""

    def build() -> Program:
        b = Builder()
        x = b.input(BatchLeaf("x"), b.leaf, "x")
        return b.program(make(b, x), level=level)

    return build


def stage(outputs: list[Any], inputs: list[Any]) -> Callable[[], Program]:
    """A stage program whose outputs are all its first input."""

    def make(b: Builder, x: Any) -> dict[Any, Any]:
        for place, role in enumerate(inputs):
            b.input(role, b.leaf, f"in{place}")
        return dict.fromkeys(outputs, x)

    return built(make, Level.STAGE)


def step(outputs: list[Any]) -> Callable[[], Program]:
    """A step program whose outputs are all the gathered rows of its one shard."""

    def build() -> Program:
        b = Builder()
        x = b.input(Shard("w"), (2, 4), "w")
        gathered = b.call(c10d.wait_tensor.default, b.call(c10d.all_gather_into_tensor.default, x, 2, "dp"))
        return b.program(dict.fromkeys(outputs, gathered), level=Level.STEP)

    return build


def no_output(program: Program) -> None:
    program.graph.erase_node(program.output_node)


def late_input(program: Program) -> None:
    with program.graph.inserting_before(program.output_node):
        program.graph.placeholder("late")


def call_method(program: Program) -> None:
    mul = named(program, "mul")
    mul.op, mul.target = "call_method", "mul"


def retarget(name: str, target: Any) -> Callable[[Program], None]:
    def change(program: Program) -> None:
        named(program, name).target = target

    return change


def argument(place: int, value: Any) -> Callable[[Program], None]:
    def change(program: Program) -> None:
        mul = named(program, "mul")
        mul.args = (*mul.args[:place], value(program) if callable(value) else value)

    return change


def forget_value(program: Program) -> None:
    meta.set_value(named(program, "relu"), None)


def backward_in_loss(program: Program) -> None:
    meta.amend(named(program, "relu"), phase=Phase.BACKWARD)


def attribute(b: Builder, x: Any) -> dict[Any, Any]:
    node = b.graph.get_attr("hidden", type_expr=None)
    meta.set_value(node, b.leaf)
    return {Output("y"): b.call(aten.add.Tensor, x, node)}


def unknown_operator(b: Builder, x: Any) -> dict[Any, Any]:
    node = b.graph.call_function(torch.ops.higher_order.while_loop, (x,))
    meta.set_value(node, b.leaf)
    return {Output("y"): node}


def all_reduce(uses: int, wait: bool = True, group: str = "dp") -> Callable[[Builder, Any], dict[Any, Any]]:
    def make(b: Builder, x: Any) -> dict[Any, Any]:
        node = b.graph.call_function(c10d.all_reduce.default, (x, "sum", group))
        meta.set_value(node, b.leaf)
        operation = c10d.wait_tensor.default if wait else aten.relu.default
        return {Output(str(i)): b.call(operation, node) for i in range(uses)} or {Output("x"): x}

    return make


def waits_twice(b: Builder, x: Any) -> dict[Any, Any]:
    reduced = b.call(c10d.all_reduce.default, x, "sum", "tp")
    return {Output("x"): b.call(c10d.wait_tensor.default, b.call(c10d.wait_tensor.default, reduced))}


def not_functional(b: Builder, x: Any) -> dict[Any, Any]:
    node = b.graph.call_function(torch.ops.c10d.barrier.default, (x,))
    meta.set_value(node, b.leaf)
    return {Output("x"): node}


def coalesced(parts_waited: int, parts_taken: int = 2) -> Callable[[Builder, Any], dict[Any, Any]]:
    def make(b: Builder, x: Any) -> dict[Any, Any]:
        node = b.graph.call_function(c10d.all_reduce_coalesced.default, ([x, x], "sum", "dp"))
        meta.set_value(node, [b.leaf, b.leaf])
        parts = [b.call(operator.getitem, node, i) for i in range(parts_taken)]
        waited = [b.call(c10d.wait_tensor.default, part) for part in parts[:parts_waited]]
        return {Output(str(i)): part for i, part in enumerate([*waited, *parts[parts_waited:]])}

    return make


def batch_norm(training: bool) -> Callable[[Builder, Any], dict[Any, Any]]:
    def make(b: Builder, x: Any) -> dict[Any, Any]:
        mean = b.input(Buffer("mean"), (b.sizes[1],), "mean")
        weight = b.input(Param("weight"), (b.sizes[1],), "weight")
        norm = b.call(aten.native_batch_norm.default, x, weight, weight, mean, mean, training, 0.1, 1e-5)
        return {Output("y"): b.call(operator.getitem, norm, 0)}

    return make


def stranger(b: Builder, x: Any) -> dict[Any, Any]:
    """A value over the sizes of another tensor, which is no input."""
    other = Builder("y", (5, 7)).leaf
    y = b.call(aten.relu.default, x)
    meta.set_value(y, other)
    return {Output("y"): y}


def read_size(b: Builder, x: Any) -> dict[Any, Any]:
    rows = b.graph.call_function(aten.sym_size.int, (x, 0))
    meta.set_value(rows, b.sizes[0])
    return {Output("y"): b.call(aten.view.default, x, [rows, -1])}


def wrong_size(b: Builder, x: Any) -> dict[Any, Any]:
    b.input(Size(str(b.sizes[0].node.expr)), b.sizes[1], "rows")
    return {Output("x"): x}


def update(b: Builder, x: Any) -> dict[Any, Any]:
    b.input(Buffer("count"), torch.empty((), dtype=torch.int64), "count")
    total = b.call(aten.sum.default, x)
    return {BufferUpdate("count"): total}


def rank_one_denominator(b: Builder, x: Any) -> dict[Any, Any]:
    b.input(Denominator("loss"), (1,), "denominator")
    return {Output("x"): x}


def float_seed(b: Builder, x: Any) -> dict[Any, Any]:
    b.input(Seed(), (), "seed")
    return {Output("x"): x}


def duplicate(program: Program) -> None:
    program.set_signature((program.inputs[0], *program.inputs[:3]), program.outputs)


def literal_result(program: Program) -> None:
    program.output_node.args = ((*program.results[:2], 3.0),)


def loose_result(program: Program) -> None:
    program.output_node.args = (program.results[0],)


BROKEN: list[tuple[str, str, Callable[[], Program]]] = [
    ("order", "does not end in its one output node", broken_step(no_output)),
    ("order", "'late' stands behind the first call", broken_step(late_input)),
    (
        "order",
        "a node of another graph, or erased",
        broken_step(argument(1, lambda p: named(training_step(), "t"))),
    ),
    ("signature", "'param fc.weight' stands 2 times", broken_step(duplicate)),
    ("signature", "result 2 is a literal", broken_step(literal_result)),
    ("signature", "does not return a flat tuple", broken_step(loose_result)),
    ("roles", "'saved 0' is no output of a joint program", built(lambda b, x: {Saved(0): x})),
    ("roles", "'activation 0>1[0]' is no output", built(lambda b, x: {Activation(0, 1, 0): x})),
    ("roles", "'param w' is no output of a stage program", stage([Param("w")], [])),
    ("roles", "'grad w' is no input of a stage program", stage([], [Grad("w")])),
    ("roles", "'batch x' is no input of a step program", built(lambda b, x: {Grad("w"): x}, Level.STEP)),
    ("roles", "'loss l' is no output of a step program", step([Loss("l")])),
    ("roles", "'shard w' is no output of a joint program", built(lambda b, x: {Shard("w"): x})),
    ("roles", "output 'loss l' is None", built(lambda b, x: {Loss("l"): None})),
    ("edges", "'activation 0>2[0]' does not join neighbours", stage([Activation(0, 2, 0)], [])),
    (
        "edges",
        "'activation 2>3[0]' belongs to another stage",
        stage([Activation(2, 3, 0)], [Activation(0, 1, 0)]),
    ),
    ("edges", "sent from stage 0 to 1 are not in order", stage([Activation(0, 1, 1)], [])),
    (
        "edges",
        "received from stage 0 are not in order",
        stage([], [Activation(0, 1, 1), Activation(0, 1, 0)]),
    ),
    ("saved", "among the outputs are not numbered", stage([Saved(1)], [])),
    ("saved", "among the inputs are not numbered", stage([], [Saved(0), Saved(2)])),
    ("calls", "'hidden' is a get_attr node", built(attribute)),
    ("calls", "'mul' is a call_method node", broken_step(call_method)),
    ("calls", "'mul' calls an unknown function", broken_step(retarget("mul", os.getenv))),
    ("calls", "'mul' calls an unknown function", broken_step(retarget("mul", torch.ops.aten.mul))),
    ("functions", "calls an operator that nothing is known of", built(unknown_operator)),
    ("pure", "'mul' writes to its arguments", broken_step(retarget("mul", aten.mul_.Tensor))),
    ("pure", "'native_batch_norm' writes its running statistics", built(batch_norm(True))),
    (
        "device",
        "'sum_1' reads the contents",
        broken_step(retarget("sum_1", aten._local_scalar_dense.default)),
    ),
    ("device", "'sym_size_int' reads a size off a tensor", built(read_size)),
    ("literals", "an argument of 'mul' is a tensor", broken_step(argument(1, torch.ones(())))),
    (
        "literals",
        "an argument of 'mul' is a symbolic number",
        broken_step(argument(1, lambda p: meta.value(named(p, "size_0")))),
    ),
    ("waits", "'all_reduce_default' is not waited for once", built(all_reduce(0))),
    ("waits", "'all_reduce_default' is not waited for once", built(all_reduce(2))),
    ("waits", "'all_reduce_default' is not waited for once", built(all_reduce(1, wait=False))),
    ("waits", "'getitem_1' is not waited for once", built(coalesced(1))),
    ("waits", "not all parts of 'all_reduce_coalesced_default' are waited for", built(coalesced(1, 1))),
    ("waits", "'wait_tensor_1' waits for what is no collective", built(waits_twice)),
    ("groups", "'all_reduce_default' names its ranks by a process group", built(all_reduce(1, group="0"))),
    ("groups", "'barrier_default' is no functional collective", built(not_functional)),
    ("phases", "loss node 'mul' uses backward node 'relu'", broken_step(backward_in_loss)),
    ("values", "the value of 'relu' is not known", broken_step(forget_value)),
    ("symbols", "the value of 'relu' has a symbol that no input gives", built(stranger)),
    ("agreement", "'size s0' has another value", built(wrong_size)),
    ("agreement", "'update count' differs from 'buffer count'", built(update)),
    ("agreement", "'denominator loss' has dimensions", built(rank_one_denominator)),
    ("agreement", "'metric m' has dimensions", built(lambda b, x: {Metric("m"): x})),
    ("agreement", "'loss l' has dimensions", built(lambda b, x: {Loss("l"): x})),
    ("agreement", "'seed' is no integer", built(float_seed)),
    ("agreement", "'output n' is no tensor", built(lambda b, x: {Output("n"): b.size(0)})),
]


@pytest.mark.parametrize(("rule", "says", "make"), BROKEN, ids=[f"{r}: {s}" for r, s, _ in BROKEN])
def test_broken(rule: str, says: str, make: Callable[[], Program]) -> None:
    error = refused(make())
    assert (rule_of(error), says in str(error)) == (rule, True), str(error)
    assert "made by 'some pass'" in str(error)


def test_every_rule_has_a_broken_program() -> None:
    assert {rule for rule, _, _ in BROKEN} == {rule.name for rule in RULES}


SOUND = [
    step([Param("w"), Grad("w")]),
    built(batch_norm(False)),
    built(coalesced(2)),
    built(all_reduce(1)),
    built(all_reduce(1, group="ranks(0-2,5)#2")),
    built(lambda b, x: {Grad("w"): None}),
    stage([Activation(1, 2, 0), Activation(1, 0, 0), Saved(0)], [Activation(0, 1, 0), Activation(2, 1, 1)]),
]


@pytest.mark.parametrize("make", SOUND)
def test_sound(make: Callable[[], Program]) -> None:
    verify(make())


def test_checking_adds_no_guards() -> None:
    program = training_step()
    environment = program.fake_mode.shape_env
    before = len(environment.guards)
    verify(program)
    str(program)
    assert len(environment.guards) == before


def test_error_names_module_and_source_line() -> None:
    program = training_step()
    meta.annotate(named(program, "relu"), Note(Phase.FORWARD, "blocks.3.act", "model.py:42"))
    forget_value(program)
    assert "node %relu, module 'blocks.3.act', model.py:42" in str(refused(program))
