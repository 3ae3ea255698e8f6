"""Checkpointed regions: what a stage keeps, what it computes again, and that the bits stay the same."""
# ruff: noqa: E501  (programs are as wide as they print)

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import TestCase
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from graphcomp.compiler import joint_passes
from graphcomp.ir import meta
from graphcomp.ir import signature as role
from graphcomp.ir.meta import Phase
from graphcomp.ir.program import Program
from graphcomp.partition import partition
from graphcomp.partition.costs import size_bytes
from graphcomp.partition.stages import Partitioned, Stage
from graphcomp.passes.cse import CommonSubexpressions
from graphcomp.passes.manager import PassManager
from tests.partition.running import assert_equal, check, inputs_of, joint_of, run_staged, square_loss

plainly: Callable[..., Any] = lambda function, *args: function(*args)  # noqa: E731
with_hooks = functools.partial(checkpoint, use_reentrant=False)
reentrant = functools.partial(checkpoint, use_reentrant=True)


class Block(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Net(nn.Module):
    """run: how a block is called."""

    def __init__(
        self, run: Callable[..., Any] = plainly, block: Callable[[], nn.Module] = Block, blocks: int = 3
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(block() for _ in range(blocks))
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = self.run(block, x)
        return x


def cut(net: nn.Module, stages: int, rows: int = 3) -> Partitioned:
    return partition(joint_of(net, square_loss, (torch.randn(rows, 4),)), stages)


def saved(stage: Stage) -> list[tuple[str, int]]:
    assert stage.backward is not None
    found = stage.backward.input_nodes()
    return [(str(node.target), size_bytes(node)) for what, node in found if isinstance(what, role.Saved)]


def calls(program: Program | None, *names: str) -> list[str]:
    assert program is not None
    return [node.name for node in program.calls() if any(name in str(node.target) for name in names)]


class TestText(TestCase):
    maxDiff = None

    def test_a_stage(self) -> None:
        joint = joint_of(Net(with_hooks, blocks=1), square_loss, (torch.randn(3, 4),))
        stage = partition(joint, 1).stages[0]
        line = inspect.getsourcelines(Block.forward)[1] + 1
        text = str(stage.backward).replace(f"test_recompute.py:{line}", "test_recompute.py:here")
        self.assertExpectedInline(
            text,
            """\
stage program "stage 0 backward"
  %blocks_0_up_weight: f32[16, 4] = param blocks.0.up.weight
  %blocks_0_down_weight: f32[4, 16] = param blocks.0.down.weight
  %_0: f32[s0, 4] = batch [0]
  %denominator_loss: i64[] = denominator loss
  %loss_scale: f32[] = loss_scale
  %s0: int = size s0
  %addmm: f32[s0, 4] = saved 0
  %add: f32[s0, 4] = saved 1
forward:
  %t_1: f32[4, 16] = t(%blocks_0_up_weight)                                     # blocks.0.up  test_recompute.py:here  recompute 0
  %t_2: f32[16, 4] = t(%blocks_0_down_weight)                                   # blocks.0.down  test_recompute.py:here  recompute 0
loss:
  %_to_copy: f32[] = _to_copy(%denominator_loss, dtype=f32)
backward:
  %div_1: f32[] = div.Tensor(%loss_scale, %_to_copy)
  %expand: f32[s0, 4] = expand(%div_1, [%s0, 4])                                # running.py:31
  %pow_2: f32[s0, 4] = pow.Tensor_Scalar(%add, 1.0)                             # running.py:31
  %mul: f32[s0, 4] = mul.Scalar(%pow_2, 2.0)                                    # running.py:31
  %mul_1: f32[s0, 4] = mul.Tensor(%expand, %mul)                                # running.py:31
  %t_3: f32[4, s0] = t(%mul_1)                                                  # blocks.0.down  test_recompute.py:here
  %mm_again: f32[s0, 16] = mm(%addmm, %t_1)                                     # blocks.0.up  test_recompute.py:here  recompute 0
  %gelu_again: f32[s0, 16] = gelu(%mm_again)                                    # blocks.0  test_recompute.py:here  recompute 0
  %mm_2: f32[4, 16] = mm(%t_3, %gelu_again)                                     # blocks.0.down  test_recompute.py:here
  %t_4: f32[16, 4] = t(%mm_2)                                                   # blocks.0.down  test_recompute.py:here
  %t_5: f32[4, 16] = t(%t_2)                                                    # blocks.0.down  test_recompute.py:here
  %mm_3: f32[s0, 16] = mm(%mul_1, %t_5)                                         # blocks.0.down  test_recompute.py:here
  %t_6: f32[4, 16] = t(%t_4)                                                    # blocks.0.down  test_recompute.py:here  of %t_2
  %gelu_backward: f32[s0, 16] = gelu_backward(%mm_3, %mm_again)                 # blocks.0  test_recompute.py:here
  %t_7: f32[16, s0] = t(%gelu_backward)                                         # blocks.0.up  test_recompute.py:here
  %mm_4: f32[16, 4] = mm(%t_7, %addmm)                                          # blocks.0.up  test_recompute.py:here
  %t_8: f32[4, 16] = t(%mm_4)                                                   # blocks.0.up  test_recompute.py:here
  %t_9: f32[16, 4] = t(%t_1)                                                    # blocks.0.up  test_recompute.py:here
  %mm_5: f32[s0, 4] = mm(%gelu_backward, %t_9)                                  # blocks.0.up  test_recompute.py:here
  %add_1: f32[s0, 4] = add.Tensor(%mul_1, %mm_5)                                # gradient sum
  %t_10: f32[16, 4] = t(%t_8)                                                   # blocks.0.up  test_recompute.py:here  of %t_1
  %t_11: f32[4, s0] = t(%add_1)                                                 # first  test_recompute.py:58  of %addmm
  %mm_6: f32[4, 4] = mm(%t_11, %_0)                                             # first  test_recompute.py:58  of %addmm
  %t_12: f32[4, 4] = t(%mm_6)                                                   # first  test_recompute.py:58  of %addmm
  %sum_2: f32[1, 4] = sum.dim_IntList(%add_1, [0], True)                        # first  test_recompute.py:58  of %addmm
  %view: f32[4] = view(%sum_2, [4])                                             # first  test_recompute.py:58  of %addmm
  %t_13: f32[4, 4] = t(%t_12)                                                   # first  test_recompute.py:58
return grad first.weight = %t_13
return grad first.bias = %view
return grad blocks.0.up.weight = %t_10
return grad blocks.0.down.weight = %t_6
""",
        )


@pytest.mark.parametrize("run", [with_hooks, reentrant])
@pytest.mark.parametrize("stages", [1, 2])
def test_only_what_a_region_was_given_is_saved(run: Any, stages: int) -> None:
    plain, lean = cut(Net(), stages), cut(Net(run), stages)
    for one, other in zip(plain.stages, lean.stages, strict=True):
        assert sum(size for _, size in saved(other)) < sum(size for _, size in saved(one))
    hidden = 3 * 4 * 4  # bytes of what flows from block to block; within a block values are wider
    assert {size for stage in lean.stages for _, size in saved(stage)} == {hidden}


@pytest.mark.parametrize("run", [with_hooks, reentrant])
def test_the_forward_runs_once_in_the_trace(run: Any) -> None:
    one, other = (joint_of(Net(how), square_loss, (torch.randn(3, 4),)).program for how in (plainly, run))
    assert [str(node.target) for node in one.calls()] == [str(node.target) for node in other.calls()]
    assert {meta.note(node).recompute for node in one.calls()} == {None}
    regions = [meta.note(node).recompute for node in other.calls() if meta.note(node).phase is Phase.FORWARD]
    assert sorted({number for number in regions if number is not None}) == [0, 1, 2]


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_bits_are_those_of_the_program_without(stages: int) -> None:
    batches = [(torch.randn(rows, 4),) for rows in (3, 5)]
    for run in (with_hooks, reentrant):
        check(Net(run), square_loss, batches, stages)
    for batch in batches:
        results = []
        for run in (plainly, with_hooks):
            net = Net(run)
            joint = joint_of(net, square_loss, batch)
            results.append(run_staged(partition(joint, stages), inputs_of(joint, net, batch)).results)
        assert_equal(*results)


def test_a_fused_program_computes_again_too_and_stays_so() -> None:
    program = cut(Net(with_hooks, blocks=2), 1).stages[0].fused
    again = calls(program, "gelu.default")
    assert again == ["gelu", "gelu_1", "gelu_1_again", "gelu_again"]
    order = [node.name for node in program.calls()]
    assert order.index("gelu_again") > order.index("gelu_backward")  # right before it is needed, not with the first
    CommonSubexpressions().apply(program)
    assert calls(program, "gelu.default") == again


class Spread(nn.Module):
    """One region over all blocks, so that a cut goes through it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.net, x, use_reentrant=False)


def test_a_region_over_several_stages_begins_anew_on_each() -> None:
    parts = check(Spread(), square_loss, [(torch.randn(3, 4),)], 2)
    assert [len(saved(stage)) for stage in parts.stages] == [0, 2]  # what arrives, and the output that the loss squares
    assert calls(parts.stages[0].backward, "gelu.default") and calls(parts.stages[1].backward, "gelu.default")


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Block(), Block()

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.b, checkpoint(self.a, x, use_reentrant=False).sin(), use_reentrant=False)


def test_a_region_inside_another_belongs_to_it() -> None:
    net = Net(with_hooks, Nested, blocks=2)
    joint = joint_of(net, square_loss, (torch.randn(3, 4),))
    notes = [meta.note(node) for node in joint.program.calls()]
    assert {note.recompute for note in notes if note.module and note.module.startswith("blocks.1")} == {1, None}
    assert {note.recompute for note in notes if note.phase is Phase.FORWARD and note.module == "blocks.1.b"} == {1}
    parts = check(net, square_loss, [(torch.randn(3, 4),)], 2)
    assert {size for stage in parts.stages for _, size in saved(stage)} == {3 * 4 * 4}


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.fc(x), 0.5).sin()


@pytest.mark.parametrize("seeded", [False, True])
def test_draws_are_kept_and_never_repeated(seeded: bool) -> None:
    joint = joint_of(Net(with_hooks, Dropped), square_loss, (torch.randn(3, 4),))
    program = PassManager(joint_passes(seeded)).run(joint.program) if seeded else joint.program
    drawing = ("bernoulli", "seeded")
    stage = partition(replace(joint, program=program), 1).stages[0]
    assert len(calls(stage.forward, *drawing)) == len(calls(stage.fused, *drawing)) == 3
    assert not calls(stage.backward, *drawing)
    assert calls(stage.backward, "addmm.default")
    if seeded:  # of what is drawn, the mask is kept: one byte an element
        assert [size for _, size in saved(stage)].count(3 * 4) == 3


def saving(*operations: Any) -> Callable[..., Any]:
    contexts = functools.partial(create_selective_checkpoint_contexts, list(operations))
    return functools.partial(checkpoint, use_reentrant=False, context_fn=contexts)


def prefer_to_save_products(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    assert not context.is_recompute
    is_product = operation is torch.ops.aten.mm.default
    return CheckpointPolicy.PREFER_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize("policy", [None, prefer_to_save_products])
def test_a_policy_says_what_is_kept(policy: Any) -> None:
    run = saving(torch.ops.aten.mm.default)
    if policy is not None:
        contexts = functools.partial(create_selective_checkpoint_contexts, policy)
        run = functools.partial(checkpoint, use_reentrant=False, context_fn=contexts)
    parts = check(Net(run), square_loss, [(torch.randn(3, 4),)], 1)
    stage = parts.stages[0]
    again = [name for name in calls(stage.backward, "") if "_again" in name]
    assert again == ["gelu_2_again", "gelu_1_again", "gelu_again"]
    assert [size for _, size in saved(stage)].count(3 * 16 * 4) == 3  # the wide product of each block
