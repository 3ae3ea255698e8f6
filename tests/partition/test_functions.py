"""Functions that operators take stand in the programs of the stages that call them, and nowhere else."""
# ruff: noqa: E501  (programs are as wide as they print)

from __future__ import annotations

import torch
from expecttest import TestCase
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention

from graphcomp.ir.program import Program
from graphcomp.partition import partition
from tests.partition.running import joint_of, square_loss


class Mixed(nn.Module):
    """Each position looks at those before it; the further away, the less."""

    def __init__(self, power: int) -> None:
        super().__init__()
        self.fc, self.slope, self.power = nn.Linear(4, 4), nn.Parameter(torch.ones(2)), power

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc(x)
        return flex_attention(h, h, h, lambda s, b, h, i, j: s - self.slope[h] * (i - j) ** self.power)


def functions(program: Program) -> str:
    """The calls that take functions, up to these, and the functions themselves."""
    lines = [line.split(", [")[0] for line in str(program).splitlines()]
    calls = [line for line in lines if "@" in line and not line.startswith("function")]
    first = next(i for i, line in enumerate(lines) if line.startswith("function"))
    return "\n".join([program.name, *calls, *str(program).splitlines()[first:]]) + "\n"


class TestText(TestCase):
    maxDiff = None

    def test_two_stages_with_functions_of_their_own(self) -> None:
        joint = joint_of(nn.Sequential(Mixed(1), Mixed(3)), square_loss, (torch.randn(3, 2, 5, 4),))
        cut = partition(joint, 2, ["1"])
        programs = [program for stage in cut.stages for program in (stage.forward, stage.backward)]
        self.assertExpectedInline(
            "\n".join(map(functions, programs)),
            """\
stage 0 forward
  %flex_attention: (f32[s0, s1, s2, 4], f32[s0, s1, s2], f32[s0, s1, s2]) = flex_attention(%view_1, %view_1, %view_1, @0
function @0(%arg0: f32[], %arg1: i32[], %arg2: i32[], %arg3: i32[], %arg4: i32[], %arg5: f32[2])
  %index: f32[] = index.Tensor(%arg5, [%arg2])
  %sub: i32[] = sub.Tensor(%arg3, %arg4)
  %pow: i32[] = pow.Tensor_Scalar(%sub, 1)
  %mul: f32[] = mul.Tensor(%index, %pow)
  %sub_1: f32[] = sub.Tensor(%arg0, %mul)
  return %sub_1
function @1(%arg0: i32[], %arg1: i32[], %arg2: i32[], %arg3: i32[])
  %new_ones: bool[] = new_ones(%arg0, [], dtype=bool, device=cpu, pin_memory=False)
  return %new_ones

stage 0 backward
  %flex_attention_backward_1: (f32[s0, s1, s2, 4], f32[s0, s1, s2, 4], f32[s0, s1, s2, 4], (f32[2])) = flex_attention_backward(%view_1, %view_1, %view_1, %detach_6, %detach_7, %view_8, None, @0, @1
function @0(%arg0: f32[], %arg1: i32[], %arg2: i32[], %arg3: i32[], %arg4: i32[], %arg5: f32[2])
  %index: f32[] = index.Tensor(%arg5, [%arg2])
  %sub: i32[] = sub.Tensor(%arg3, %arg4)
  %pow: i32[] = pow.Tensor_Scalar(%sub, 1)
  %mul: f32[] = mul.Tensor(%index, %pow)
  %sub_1: f32[] = sub.Tensor(%arg0, %mul)
  return %sub_1
function @1(%arg0: f32[], %arg1: i32[], %arg2: i32[], %arg3: i32[], %arg4: i32[], %arg5: f32[], %arg6: f32[2])
  %sub: i32[] = sub.Tensor(%arg3, %arg4)
  %pow: i32[] = pow.Tensor_Scalar(%sub, 1)
  %neg: f32[] = neg(%arg5)
  %mul: f32[] = mul.Tensor(%neg, %pow)
  %zeros_and_scatter: f32[2] = flex_lib.zeros_and_scatter([2], [%arg2], %mul)
  return [%arg5, None, None, None, None, %zeros_and_scatter]
function @2(%arg0: i32[], %arg1: i32[], %arg2: i32[], %arg3: i32[])
  %new_ones: bool[] = new_ones(%arg0, [], dtype=bool, device=cpu, pin_memory=False)
  return %new_ones

stage 1 forward
  %flex_attention_1: (f32[s0, s1, s2, 4], f32[s0, s1, s2], f32[s0, s1, s2]) = flex_attention(%view_4, %view_4, %view_4, @0
function @0(%arg0: f32[], %arg1: i32[], %arg2: i32[], %arg3: i32[], %arg4: i32[], %arg5: f32[2])
  %index: f32[] = index.Tensor(%arg5, [%arg2])
  %sub: i32[] = sub.Tensor(%arg3, %arg4)
  %pow: i32[] = pow.Tensor_Scalar(%sub, 3)
  %mul: f32[] = mul.Tensor(%index, %pow)
  %sub_1: f32[] = sub.Tensor(%arg0, %mul)
  return %sub_1
function @1(%arg0: i32[], %arg1: i32[], %arg2: i32[], %arg3: i32[])
  %new_ones: bool[] = new_ones(%arg0, [], dtype=bool, device=cpu, pin_memory=False)
  return %new_ones

stage 1 backward
  %flex_attention_backward: (f32[s0, s1, s2, 4], f32[s0, s1, s2, 4], f32[s0, s1, s2, 4], (f32[2])) = flex_attention_backward(%view_4, %view_4, %view_4, %detach_4, %detach_5, %mul_17, None, @0, @1
function @0(%arg0: f32[], %arg1: i32[], %arg2: i32[], %arg3: i32[], %arg4: i32[], %arg5: f32[2])
  %index: f32[] = index.Tensor(%arg5, [%arg2])
  %sub: i32[] = sub.Tensor(%arg3, %arg4)
  %pow: i32[] = pow.Tensor_Scalar(%sub, 3)
  %mul: f32[] = mul.Tensor(%index, %pow)
  %sub_1: f32[] = sub.Tensor(%arg0, %mul)
  return %sub_1
function @1(%arg0: f32[], %arg1: i32[], %arg2: i32[], %arg3: i32[], %arg4: i32[], %arg5: f32[], %arg6: f32[2])
  %sub: i32[] = sub.Tensor(%arg3, %arg4)
  %pow: i32[] = pow.Tensor_Scalar(%sub, 3)
  %neg: f32[] = neg(%arg5)
  %mul: f32[] = mul.Tensor(%neg, %pow)
  %zeros_and_scatter: f32[2] = flex_lib.zeros_and_scatter([2], [%arg2], %mul)
  return [%arg5, None, None, None, None, %zeros_and_scatter]
function @2(%arg0: i32[], %arg1: i32[], %arg2: i32[], %arg3: i32[])
  %new_ones: bool[] = new_ones(%arg0, [], dtype=bool, device=cpu, pin_memory=False)
  return %new_ones
""",
        )
