"""Both stages of a small model as text."""

from __future__ import annotations

import torch
from expecttest import TestCase
from torch import Tensor, nn

from graphcomp.partition import partition
from tests.partition.running import joint_of, square_loss


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.fc(x))


class TestText(TestCase):
    maxDiff = None

    def test_two_blocks(self) -> None:
        joint = joint_of(nn.Sequential(Block(), Block()), square_loss, (torch.randn(3, 4),))
        self.assertExpectedInline(
            str(partition(joint, 2)),
            """\
stage program "prologue"
  %s0: int = size s0
loss:
  %full: i64[] = full([], %s0, dtype=i64, device=cpu, pin_memory=False)
return tokens loss = %full

stage program "stage 0 forward"
  %_0_fc_weight: f32[4, 4] = param 0.fc.weight
  %_0: f32[s0, 4] = batch [0]
forward:
  %t: f32[4, 4] = t(%_0_fc_weight)                                              # 0.fc  test_text.py:19
  %mm: f32[s0, 4] = mm(%_0, %t)                                                 # 0.fc  test_text.py:19
  %relu: f32[s0, 4] = relu(%mm)                                                 # 0  test_text.py:19
  %detach: f32[s0, 4] = detach(%relu)                                           # 0  test_text.py:19
  %add: f32[s0, 4] = add.Tensor(%_0, %relu)                                     # 0  test_text.py:19
return activation 0>1[0] = %add
return saved 0 = %relu

stage program "stage 0 backward"
  %_0: f32[s0, 4] = batch [0]
  %add_2: f32[s0, 4] = gradient 1>0[0]
  %relu: f32[s0, 4] = saved 0
forward:
  %detach: f32[s0, 4] = detach(%relu)                                           # 0  test_text.py:19
backward:
  %detach_3: f32[s0, 4] = detach(%detach)                                       # 0  test_text.py:19  of %relu
  %threshold_backward_1: f32[s0, 4] = threshold_backward(%add_2, %detach_3, 0)  # 0  test_text.py:19  of %relu
  %t_6: f32[4, s0] = t(%threshold_backward_1)                                   # 0.fc  test_text.py:19
  %mm_4: f32[4, 4] = mm(%t_6, %_0)                                              # 0.fc  test_text.py:19
  %t_7: f32[4, 4] = t(%mm_4)                                                    # 0.fc  test_text.py:19
  %t_8: f32[4, 4] = t(%t_7)                                                     # 0.fc  test_text.py:19
return grad 0.fc.weight = %t_8

stage program "stage 1 forward"
  %_1_fc_weight: f32[4, 4] = param 1.fc.weight
  %denominator_loss: i64[] = denominator loss
  %add: f32[s0, 4] = activation 0>1[0]
forward:
  %t_1: f32[4, 4] = t(%_1_fc_weight)                                            # 1.fc  test_text.py:19
  %mm_1: f32[s0, 4] = mm(%add, %t_1)                                            # 1.fc  test_text.py:19
  %relu_1: f32[s0, 4] = relu(%mm_1)                                             # 1  test_text.py:19
  %detach_1: f32[s0, 4] = detach(%relu_1)                                       # 1  test_text.py:19
  %add_1: f32[s0, 4] = add.Tensor(%add, %relu_1)                                # 1  test_text.py:19
loss:
  %pow_1: f32[s0, 4] = pow.Tensor_Scalar(%add_1, 2)                             # running.py:31
  %sum_1: f32[] = sum(%pow_1)                                                   # running.py:31
  %_to_copy: f32[] = _to_copy(%denominator_loss, dtype=f32)
return saved 0 = %add
return saved 1 = %relu_1
return loss loss = %sum_1
return output output = %add_1

stage program "stage 1 backward"
  %_1_fc_weight: f32[4, 4] = param 1.fc.weight
  %denominator_loss: i64[] = denominator loss
  %loss_scale: f32[] = loss_scale
  %s0: int = size s0
  %add: f32[s0, 4] = saved 0
  %relu_1: f32[s0, 4] = saved 1
forward:
  %t_1: f32[4, 4] = t(%_1_fc_weight)                                            # 1.fc  test_text.py:19
  %detach_1: f32[s0, 4] = detach(%relu_1)                                       # 1  test_text.py:19
  %add_1: f32[s0, 4] = add.Tensor(%add, %relu_1)                                # 1  test_text.py:19
loss:
  %_to_copy: f32[] = _to_copy(%denominator_loss, dtype=f32)
backward:
  %div_1: f32[] = div.Tensor(%loss_scale, %_to_copy)
  %expand: f32[s0, 4] = expand(%div_1, [%s0, 4])                                # running.py:31
  %pow_2: f32[s0, 4] = pow.Tensor_Scalar(%add_1, 1.0)                           # running.py:31
  %mul: f32[s0, 4] = mul.Scalar(%pow_2, 2.0)                                    # running.py:31
  %mul_1: f32[s0, 4] = mul.Tensor(%expand, %mul)                                # running.py:31
  %detach_2: f32[s0, 4] = detach(%detach_1)                                     # 1  test_text.py:19  of %relu_1
  %threshold_backward: f32[s0, 4] = threshold_backward(%mul_1, %detach_2, 0)    # 1  test_text.py:19  of %relu_1
  %t_2: f32[4, s0] = t(%threshold_backward)                                     # 1.fc  test_text.py:19
  %mm_2: f32[4, 4] = mm(%t_2, %add)                                             # 1.fc  test_text.py:19
  %t_3: f32[4, 4] = t(%mm_2)                                                    # 1.fc  test_text.py:19
  %t_4: f32[4, 4] = t(%t_1)                                                     # 1.fc  test_text.py:19
  %mm_3: f32[s0, 4] = mm(%threshold_backward, %t_4)                             # 1.fc  test_text.py:19
  %add_2: f32[s0, 4] = add.Tensor(%mul_1, %mm_3)                                # gradient sum
  %t_5: f32[4, 4] = t(%t_3)                                                     # 1.fc  test_text.py:19  of %t_1
return gradient 1>0[0] = %add_2
return grad 1.fc.weight = %t_5

stage program "stage 1 forward and backward"
  %_1_fc_weight: f32[4, 4] = param 1.fc.weight
  %denominator_loss: i64[] = denominator loss
  %loss_scale: f32[] = loss_scale
  %s0: int = size s0
  %add: f32[s0, 4] = activation 0>1[0]
forward:
  %t_1: f32[4, 4] = t(%_1_fc_weight)                                            # 1.fc  test_text.py:19
  %mm_1: f32[s0, 4] = mm(%add, %t_1)                                            # 1.fc  test_text.py:19
  %relu_1: f32[s0, 4] = relu(%mm_1)                                             # 1  test_text.py:19
  %detach_1: f32[s0, 4] = detach(%relu_1)                                       # 1  test_text.py:19
  %add_1: f32[s0, 4] = add.Tensor(%add, %relu_1)                                # 1  test_text.py:19
loss:
  %pow_1: f32[s0, 4] = pow.Tensor_Scalar(%add_1, 2)                             # running.py:31
  %sum_1: f32[] = sum(%pow_1)                                                   # running.py:31
  %_to_copy: f32[] = _to_copy(%denominator_loss, dtype=f32)
backward:
  %div_1: f32[] = div.Tensor(%loss_scale, %_to_copy)
  %expand: f32[s0, 4] = expand(%div_1, [%s0, 4])                                # running.py:31  of %sum_1
  %pow_2: f32[s0, 4] = pow.Tensor_Scalar(%add_1, 1.0)                           # running.py:31  of %pow_1
  %mul: f32[s0, 4] = mul.Scalar(%pow_2, 2.0)                                    # running.py:31  of %pow_1
  %mul_1: f32[s0, 4] = mul.Tensor(%expand, %mul)                                # running.py:31  of %pow_1
  %detach_2: f32[s0, 4] = detach(%detach_1)                                     # 1  test_text.py:19  of %relu_1
  %threshold_backward: f32[s0, 4] = threshold_backward(%mul_1, %detach_2, 0)    # 1  test_text.py:19  of %relu_1
  %t_2: f32[4, s0] = t(%threshold_backward)                                     # 1.fc  test_text.py:19  of %mm_1
  %mm_2: f32[4, 4] = mm(%t_2, %add)                                             # 1.fc  test_text.py:19  of %mm_1
  %t_3: f32[4, 4] = t(%mm_2)                                                    # 1.fc  test_text.py:19  of %mm_1
  %t_4: f32[4, 4] = t(%t_1)                                                     # 1.fc  test_text.py:19  of %mm_1
  %mm_3: f32[s0, 4] = mm(%threshold_backward, %t_4)                             # 1.fc  test_text.py:19  of %mm_1
  %add_2: f32[s0, 4] = add.Tensor(%mul_1, %mm_3)                                # gradient sum
  %t_5: f32[4, 4] = t(%t_3)                                                     # 1.fc  test_text.py:19  of %t_1
return loss loss = %sum_1
return output output = %add_1
return gradient 1>0[0] = %add_2
return grad 1.fc.weight = %t_5

boundary 0>1: add: f32[s0, 4]
boundary 1>0: add_2: f32[s0, 4]
""",
        )
