"""In-place operations: text, meaning, and what is refused."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from expecttest import TestCase
from torch import Tensor, nn

from graphcomp import Plan, testing
from graphcomp.capture.capture import capture
from graphcomp.errors import CaptureError, StateError
from graphcomp.ir import interp, meta
from graphcomp.ir import signature as role
from graphcomp.ir.meta import Note, Phase
from graphcomp.ir.printer import print_program
from graphcomp.ir.program import Program
from graphcomp.ir.verify import verify
from graphcomp.passes.dead_code import DeadCode
from graphcomp.passes.functionalize import Functionalize, functionalize, is_functional
from graphcomp.passes.retrace import Replay, retrace
from tests.ir.build import Builder, aten
from tests.passes.running import DENOMINATOR, SEED, inputs, results, sample
from tests.zoo import ZOO


def counting() -> Program:
    """A counter in a buffer, and an in-place operation on a view of an intermediate."""
    b = Builder(example=(6, 8))
    b.input(role.BatchLeaf("x"), b.leaf, "x")
    x = b.graph.find_nodes(op="placeholder")[0]
    count = b.input(role.Buffer("count"), (), "count")
    b.size(0)
    b.size(1)
    b.note = Note(Phase.FORWARD, "fc", "model.py:3", operation=0)
    b.call(aten.add_.Tensor, count, 1)
    sine = b.call(aten.sin.default, x)
    part = b.call(aten.select.int, sine, 0, 0)
    b.note = Note(Phase.FORWARD, "fc", "model.py:4", operation=1)
    b.call(aten.relu_.default, part)
    b.note = Note(Phase.LOSS, None, "train.py:9", operation=2)
    total = b.call(aten.sum.default, sine)
    return b.program({role.Loss("loss"): total})


class TestText(TestCase):
    maxDiff = None

    def test_before_and_after(self) -> None:
        before = counting()
        self.assertExpectedInline(
            print_program(before),
            """\
joint program "sample"
  %x: f32[s0, s1] = batch x
  %count: f32[] = buffer count
  %s0: int = size s0
  %s1: int = size s1
forward:
  %add_: f32[] = add_.Tensor(%count, 1)                                         # fc  model.py:3
  %sin: f32[s0, s1] = sin(%x)                                                   # fc  model.py:3
  %select: f32[s1] = select.int(%sin, 0, 0)                                     # fc  model.py:3
  %relu_: f32[s1] = relu_(%select)                                              # fc  model.py:4
loss:
  %sum_1: f32[] = sum(%sin)                                                     # train.py:9
return loss loss = %sum_1
""",
        )
        self.assertExpectedInline(
            print_program(Functionalize().apply(before)),
            """\
joint program "sample"
  %x: f32[s0, s1] = batch x
  %count: f32[] = buffer count
  %s0: int = size s0
  %s1: int = size s1
forward:
  %add: f32[] = add.Tensor(%count, 1)                                           # fc  model.py:3
  %sin: f32[s0, s1] = sin(%x)                                                   # fc  model.py:3
  %select: f32[s1] = select.int(%sin, 0, 0)                                     # fc  model.py:3
  %relu__relu: f32[s1] = relu(%select)                                          # fc  model.py:4
  %relu__select_scatter: f32[s0, s1] = select_scatter(%sin, %relu__relu, 0, 0)  # fc  model.py:4
  %relu: f32[s1] = select.int(%relu__select_scatter, 0, 0)                      # fc  model.py:4
loss:
  %sum_1: f32[] = sum(%relu__select_scatter)                                    # train.py:9
return loss loss = %sum_1
return update count = %add
""",
        )


@pytest.mark.parametrize("name", ["batch_norm", "dropout", "moe"])
def test_the_zoo_computes_the_same_and_buffers_become_outputs(name: str) -> None:
    """Compared with the traced graph itself, run with its in-place operations."""
    joint, given = sample(ZOO[name])
    functional = DeadCode().apply(functionalize(joint.program.copy()))
    verify(functional, made_by="functionalize")
    assert is_functional(functional)
    for each in given:
        mutated = {what: v.clone() if isinstance(v, Tensor) else v for what, v in each.items()}
        expected, found = results(joint.program, mutated), results(functional, each)
        changed = [
            what.name
            for what, value in each.items()
            if isinstance(what, role.Buffer) and not torch.equal(value, mutated[what])
        ]
        assert sorted(w.name for w in found if isinstance(w, role.BufferUpdate)) == sorted(changed)
        expected |= {role.BufferUpdate(name): mutated[role.Buffer(name)] for name in changed}
        for what, value in expected.items():
            assert value is found[what] or torch.equal(value, found[what]), what


def test_a_functional_program_comes_back_as_it_is() -> None:
    joint, _ = sample(ZOO["mlp"])
    assert functionalize(joint.program) is joint.program


def test_every_node_keeps_its_place_in_the_model() -> None:
    joint, _ = sample(ZOO["batch_norm"])
    functional = functionalize(joint.program)
    forward = {meta.note(n).operation for n in functional.calls() if meta.note(n).phase is not Phase.BACKWARD}
    for node in functional.calls():
        note = meta.note(node)
        if note.phase is Phase.BACKWARD and note.operation is not None:
            assert note.operation in forward, node.name
    assert {"norm1", "norm2"} <= {meta.note(node).module for node in functional.calls()}


class Buffers(nn.Module):
    """Buffers written in every way, and read before and after."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(4))
        self.register_buffer("history", torch.zeros(3, 4))
        self.register_buffer("latest", torch.zeros(4))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("still", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        before = self.latest.sum()
        self.seen += x.shape[0]
        self.history[0].copy_(x.detach().mean(0))
        self.history[1:].add_(self.history[:1])
        self.latest = self.latest * 0.5 + self.history[1]
        y = (x * self.w * self.still).reshape(-1)
        y[0] = 0.0
        return y.sum() + before + self.latest.sum()


def test_buffers_written_in_part_through_views_or_replaced() -> None:
    torch.manual_seed(0)
    model, batch = Buffers(), {"x": torch.randn(5, 4)}
    joint = capture(model, lambda output, batch: output, batch)
    program = functionalize(joint.program)
    verify(program, made_by="functionalize")
    given = inputs(joint, model, batch)
    found = interp.run(program, {what: given[what] for what in program.inputs if what in given})
    loss = model(**batch)
    loss.backward()
    assert torch.equal(found[role.Loss("loss")], loss.detach())
    for name in ("history", "latest", "seen"):
        assert torch.equal(found[role.BufferUpdate(name)], getattr(model, name)), name
    assert role.BufferUpdate("still") not in found


def test_batch_norm_in_eval_mode_changes_no_buffer() -> None:
    model, batch = (
        nn.Sequential(nn.BatchNorm1d(4), nn.ReLU(inplace=True), nn.Linear(4, 1)).eval(),
        torch.randn(5, 4),
    )
    joint = capture(model, lambda output, batch: output.sum(), batch)
    program = functionalize(joint.program.copy())
    verify(program, made_by="functionalize")
    assert not [what for what in program.outputs if isinstance(what, role.BufferUpdate)]
    given = inputs(joint, model, batch)
    assert torch.equal(results(program, given)[role.Loss("loss")], model(batch).sum().detach())


def test_random_operations_draw_what_they_drew() -> None:
    layers = {"first": nn.Linear(4, 4), "drop": nn.Dropout(0.5), "last": nn.Linear(4, 1)}
    model, batch = nn.Sequential(OrderedDict(layers)), torch.randn(5, 4)
    joint = capture(model, lambda output, batch: output.sum(), batch)
    found = results(functionalize(joint.program), inputs(joint, model, batch))
    torch.manual_seed(SEED)
    (model(batch).sum() / DENOMINATOR).backward()
    for name, parameter in model.named_parameters():
        assert torch.equal(found[role.Grad(name)], parameter.grad), name


def refused(what: role.Role) -> Program:
    b = Builder(example=(6, 8))
    x = b.input(what, b.leaf, "x")
    b.input(role.Size("unused"), b.sizes[0], "s")
    b.note = Note(Phase.FORWARD, "fc", "model.py:3")
    b.call(aten.mul_.Tensor, b.call(aten.t.default, x), 2)
    return b.program({role.Loss("loss"): b.call(aten.sum.default, x)})


class TestRefused(TestCase):
    maxDiff = None

    def test_parameter(self) -> None:
        with pytest.raises(StateError) as error:
            functionalize(refused(role.Param("fc.weight")))
        self.assertExpectedInline(
            str(error.value),
            """\
the model changes parameter 'fc.weight' in place
  where: model.py:3, module 'fc', operation aten.mul_.Tensor
  expected: parameters that only the optimizer changes
  what to do: make it a buffer, or change it outside of forward
  (see docs/errors.md#stateerror)""",
        )

    def test_batch(self) -> None:
        with pytest.raises(CaptureError) as error:
            functionalize(refused(role.BatchLeaf("['x']")))
        self.assertExpectedInline(
            str(error.value),
            """\
the model or the loss changes the input 'batch ['x']' in place
  where: model.py:3, module 'fc', operation aten.mul_.Tensor
  expected: inputs that are only read
  what to do: work on a copy: x = x.clone()
  (see docs/errors.md#captureerror)""",
        )

    def test_captured(self) -> None:
        with pytest.raises(CaptureError, match="captured table"):
            functionalize(refused(role.Captured("table")))


class DropsTransposed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(self.fc(x).transpose(0, 1), 0.5)


def test_a_draw_into_transposed_memory_is_that_of_eager() -> None:
    plan = Plan(backend="eager", quiet=True)
    testing.check_parity(DropsTransposed(), lambda output, x: output.square().mean(), [torch.randn(3, 4)], plan=plan)


class Breaks(Replay):
    def operation(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is aten.relu_.default:
            raise RuntimeError("no plain numbers\nat some place of torch")
        return super().operation(target, args, kwargs)


def test_an_operation_that_fails_in_the_second_trace_is_named_with_its_line() -> None:
    with pytest.raises(CaptureError, match=r"'aten.relu_.default' cannot be traced a second time") as caught:
        retrace(counting(), Breaks)
    assert caught.value.where == "module 'fc', model.py:4, node 'relu_'"
    assert caught.value.got == "RuntimeError: no plain numbers"
