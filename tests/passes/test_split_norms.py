"""Batch norms taken apart: text, meaning, and that old statistics reach nothing but new ones."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from expecttest import TestCase
from torch import nn

from graphcomp.ir import signature as role
from graphcomp.ir.printer import print_program
from graphcomp.ir.verify import verify
from graphcomp.passes.dead_code import DeadCode
from graphcomp.passes.functionalize import functionalize
from graphcomp.passes.split_norms import SplitNorms
from tests.partition.running import joint_of, square_loss
from tests.passes.running import assert_same, inputs, results, sample
from tests.zoo import ZOO


class TestText(TestCase):
    maxDiff = None

    def test_after(self) -> None:
        model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3, momentum=0.3, affine=False)).double()
        program = SplitNorms().apply(joint_of(model, square_loss, torch.randn(5, 4, dtype=torch.float64)).program)
        verify(program, made_by="split_norms")
        text = print_program(program).split("forward:\n")[1].split("loss:\n")[0]
        lines = [line.split("  #")[0].rstrip()[:110] for line in text.splitlines()]
        self.assertExpectedInline(
            "\n".join(lines),
            """\
  %t: f64[4, 3] = t(%_0_weight)
  %addmm: f64[s0, 3] = addmm(%_0_bias, %batch, %t)
  %add: i64[] = add.Tensor(%_1_num_batches_tracked, 1)
  %native_batch_norm_new_zeros: f64[3] = new_zeros(%addmm, [3], dtype=f64)
  %native_batch_norm_new_zeros_1: f64[3] = new_zeros(%addmm, [3], dtype=f64)
  %native_batch_norm: (f64[s0, 3], f64[3], f64[3], f64[3], f64[3]) = _native_batch_norm_legit_functional(%addm
  %getitem: f64[s0, 3] = %native_batch_norm[0]
  %getitem_1: f64[3] = %native_batch_norm[1]
  %getitem_2: f64[3] = %native_batch_norm[2]
  %native_batch_norm_item: f64[3] = %native_batch_norm[3]
  %native_batch_norm_item_1: f64[3] = %native_batch_norm[4]
  %native_batch_norm_mul: f64[3] = mul.Tensor(%native_batch_norm_item, 0.3)
  %native_batch_norm_mul_1: f64[3] = mul.Tensor(%_1_running_mean, 0.7)
  %native_batch_norm_add: f64[3] = add.Tensor(%native_batch_norm_mul, %native_batch_norm_mul_1)
  %native_batch_norm_mul_2: f64[3] = mul.Tensor(%native_batch_norm_item_1, 0.3)
  %native_batch_norm_mul_3: f64[3] = mul.Tensor(%_1_running_var, 0.7)
  %native_batch_norm_add_1: f64[3] = add.Tensor(%native_batch_norm_mul_2, %native_batch_norm_mul_3)""",
        )


def test_the_same_bits_and_no_way_from_old_statistics_to_the_rest() -> None:
    joint, given = sample(ZOO["batch_norm"], torch.float64)
    before = DeadCode().apply(functionalize(joint.program))
    after = DeadCode().apply(SplitNorms().apply(before.copy()))
    assert_same(before, after, given[0])
    found, pending = set(), [node for what, node in after.input_nodes() if isinstance(what, role.Buffer)]
    while pending:
        node = pending.pop()
        found.add(node)
        pending += [user for user in node.users if user.op != "output"]
    reached = {what for what, node in after.output_items() if node in found}
    assert reached == {what for what in after.outputs if isinstance(what, role.BufferUpdate)} and len(reached) == 6


def test_the_last_bit_of_a_running_variance_in_f32() -> None:
    joint, given = sample(ZOO["batch_norm"], torch.float32)
    before = DeadCode().apply(functionalize(joint.program))
    after = DeadCode().apply(SplitNorms().apply(before.copy()))
    one, other = results(before, given[0]), results(after, given[0])
    assert list(one) == list(other)
    for what, value in one.items():
        if isinstance(what, role.BufferUpdate) and what.name.endswith("running_var"):
            bits = [each.view(torch.int32) for each in (value, other[what])]
            assert (bits[0] - bits[1]).abs().max() <= 1, what
        else:
            assert torch.equal(value, other[what]), what


class Frozen(nn.BatchNorm1d):
    """Normalises with the statistics it has, also in train mode, by the operation that could update them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given = (x, self.weight, self.bias, self.running_mean, self.running_var)
        return torch.ops.aten._native_batch_norm_legit_functional(*given, False, 0.1, self.eps)[0]


def test_statistics_that_are_used_stay() -> None:
    model = nn.Sequential(nn.Linear(4, 3), Frozen(3)).double()
    model[1].running_mean.fill_(3.0)
    model[1].running_var.fill_(2.0)
    x = torch.randn(5, 4, dtype=torch.float64)
    joint = joint_of(model, square_loss, x)
    split = SplitNorms().apply(functionalize(joint.program))
    verify(split, made_by="split_norms")
    assert "new_zeros" not in print_program(split)
    expected = F.batch_norm(model[0](x), model[1].running_mean, model[1].running_var, eps=model[1].eps)
    found = results(split, inputs(joint, model, x))
    loss = next(value for what, value in found.items() if isinstance(what, role.Loss))
    assert loss.item() == pytest.approx(square_loss(expected, x).total.item(), rel=1e-12)
