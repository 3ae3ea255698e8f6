"""Runs the uncut joint program and its stage programs on the same inputs: one microbatch, all in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from graphcomp.capture.batch import describe
from graphcomp.capture.joint import Joint
from graphcomp.ir import interp, meta
from graphcomp.ir import signature as role
from graphcomp.ir.program import Program
from graphcomp.ir.signature import Role
from graphcomp.ir.verify import verify
from graphcomp.losses import TokenLoss
from graphcomp.partition import Partitioned, partition
from graphcomp.passes.dead_code import DeadCode
from graphcomp.passes.functionalize import functionalize
from tests.sharing import captures

SEED = 5
Values = dict[Role, Any]


def square_loss(output: torch.Tensor, batch: Any) -> TokenLoss:
    """A loss for models whose output is all that matters; its count is a plain size."""
    return TokenLoss(output.square().sum(), output.shape[0])


def joint_of(model: nn.Module, loss_fn: Callable[[Any, Any], Any], batch: Any) -> Joint:
    """The joint program in the form in which it is cut: functional, without dead code."""
    joint = captures(model, loss_fn, batch)
    program = DeadCode().apply(functionalize(joint.program.copy()))
    verify(program, "dead_code")
    return replace(joint, program=program)


def inputs_of(joint: Joint, model: nn.Module, batch: Any) -> Values:
    """Every input of the joint program from the live model and one microbatch; denominators come from the counts."""
    _, leaves = describe(batch)
    sizes = joint.sizes.fit(leaves)
    if sizes is None:
        raise ValueError(joint.sizes.differences(joint.sizes.bind(leaves), leaves))
    found: Values = {role.Size(symbol): size for symbol, size in sizes.items()}
    found |= {role.BatchLeaf(path): leaf for path, leaf in leaves.items()}
    found |= {role.Param(name): p.detach() for name, p in model.named_parameters()}
    found |= {role.Buffer(name): b.clone() for name, b in model.named_buffers()}
    found |= {role.Captured(name): where.read() for name, where in joint.captured.items()}
    for what, node in joint.program.input_nodes():
        value = meta.tensor(node)
        if isinstance(what, role.Denominator | role.LossScale) and value is not None:
            found[what] = torch.full((), 7 if isinstance(what, role.Denominator) else 1, dtype=value.dtype)
    return found


def run_joint(joint: Joint, given: Values) -> Values:
    torch.manual_seed(SEED)
    return interp.run(joint.program, given)


@dataclass
class Staged:
    """What the stages yield together, and the messages in the order in which they were made."""

    results: Values
    messages: dict[Role, Any]


def run_staged(cut: Partitioned, given: Values, *, fused: bool = False) -> Staged:
    """All forwards, then all backwards. Gradients of several stages are added, the last stage's first.

    fused: run the last stage's forward and backward as one. Messages arrive dense, as from a transport.
    """
    torch.manual_seed(SEED)
    ambient = dict(given)
    results: Values = {}
    messages: Values = {}
    saved: list[Values] = []

    def collect(found: Values) -> Values:
        kept = {}
        for what, value in found.items():
            if isinstance(what, role.Saved):
                kept[what] = value
            elif isinstance(what, role.Activation):
                assert isinstance(value, torch.Tensor), what
                messages[what] = value.contiguous()
            elif isinstance(what, role.Grad) and results.get(what) is not None and value is not None:
                results[what] = results[what] + value
            else:
                assert what not in results, what
                results[what] = value
        return kept

    if cut.prologue is not None:
        verify(cut.prologue, "partition")
        collect(interp.run(cut.prologue, ambient))
    last = len(cut.stages) - 1
    for stage in cut.stages:
        program = stage.fused if fused and stage.index == last and stage.fused else stage.forward
        saved.append(collect(_run(program, ambient, messages, {})))
    for stage in reversed(cut.stages):
        if stage.backward is not None and not (fused and stage.index == last):
            collect(_run(stage.backward, ambient, messages, saved[stage.index]))
    return Staged(results, messages)


def _run(program: Program, ambient: Values, messages: Values, saved: Values) -> Values:
    verify(program, "partition")
    assert all(isinstance(what, role.AMBIENT) or what in messages or what in saved for what in program.inputs)
    return interp.run(program, {**ambient, **messages, **saved})


def check(
    model: nn.Module,
    loss_fn: Callable[[Any, Any], Any],
    batches: Sequence[Any],
    stages: int = 1,
    split: Sequence[str] | None = None,
    joint: Joint | None = None,
) -> Partitioned:
    """Cut, and compare with the uncut program bitwise: every result, for every microbatch, fused or not."""
    joint = joint if joint is not None else joint_of(model, loss_fn, batches[0])
    before = str(joint.program)
    cut = partition(joint, stages, split)
    assert str(joint.program) == before and cut.joint is joint
    assert len(cut.stages) == (len(split) + 1 if split is not None else stages)
    for batch in batches:
        given = inputs_of(joint, model, batch)
        expected = run_joint(joint, given)
        for fused in (False, True):
            assert_equal(run_staged(cut, given, fused=fused).results, expected)
    return cut


def assert_equal(found: Values, expected: Values) -> None:
    """The same roles and, bit by bit, the same values; a gradient that does not exist may be left out."""
    present = {what for what, value in expected.items() if value is not None}
    assert {what for what, value in found.items() if value is not None} == present
    for what in sorted(present, key=str):
        one, two = found[what], expected[what]
        assert (one.dtype, one.shape) == (two.dtype, two.shape), what
        assert torch.equal(one, two), f"{what}: {(one - two).abs().max()}"


def carried(cut: Partitioned) -> tuple[list[int], list[int]]:
    """How many values each boundary carries: forward by source stage 0, 1, ...; backward by source stage 1, 2, ..."""
    count = len(cut.stages)
    return (
        [len(cut.forward_boundaries[s].values) if s in cut.forward_boundaries else 0 for s in range(count - 1)],
        [len(cut.backward_boundaries[s].values) if s in cut.backward_boundaries else 0 for s in range(1, count)],
    )
