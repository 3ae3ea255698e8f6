"""Values that a backward computes again instead of keeping."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from expecttest import TestCase
from torch import Tensor, nn

from graphcomp.ir import signature as role
from graphcomp.partition import partition
from graphcomp.partition.costs import size_bytes
from graphcomp.partition.stages import Partitioned, Stage
from tests.partition.running import inputs_of, joint_of, run_staged, square_loss


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 16, bias=False), nn.Linear(16, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Dropped(nn.Module):
    """A mask that is drawn, and a product with it."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.out = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.dropout(self.fc(x).sin(), 0.5))


def kept_everything(monkeypatch: pytest.MonkeyPatch, model: nn.Module, x: Tensor) -> Partitioned:
    with monkeypatch.context() as patch:
        patch.setitem(partition.__globals__, "without_recomputable", lambda nodes, *_: list(nodes))
        return partition(joint_of(model, square_loss, (x,)), 2, ["1"])


def saved_bytes(stage: Stage) -> int:
    return sum(size_bytes(node) for what, node in stage.backward.input_nodes() if isinstance(what, role.Saved))


class TestText(TestCase):
    maxDiff = None

    def test_an_activation_function_is_computed_again(self) -> None:
        joint = joint_of(nn.Sequential(Block(), Block()), square_loss, (torch.randn(3, 4),))
        stage = partition(joint, 2, ["1"]).stages[0]
        self.assertExpectedInline(
            str(stage),
            """\
stage program "stage 0 forward"
  %_0_up_weight: f32[16, 4] = param 0.up.weight
  %_0_down_weight: f32[4, 16] = param 0.down.weight
  %_0: f32[s0, 4] = batch [0]
forward:
  %t: f32[4, 16] = t(%_0_up_weight)                                             # 0.up  test_remat.py:24
  %mm: f32[s0, 16] = mm(%_0, %t)                                                # 0.up  test_remat.py:24
  %gelu: f32[s0, 16] = gelu(%mm)                                                # 0  test_remat.py:24
  %t_1: f32[16, 4] = t(%_0_down_weight)                                         # 0.down  test_remat.py:24
  %mm_1: f32[s0, 4] = mm(%gelu, %t_1)                                           # 0.down  test_remat.py:24
return activation 0>1[0] = %mm_1
return saved 0 = %mm

stage program "stage 0 backward"
  %_0_down_weight: f32[4, 16] = param 0.down.weight
  %_0: f32[s0, 4] = batch [0]
  %mm_7: f32[s0, 4] = gradient 1>0[0]
  %mm: f32[s0, 16] = saved 0
forward:
  %gelu: f32[s0, 16] = gelu(%mm)                                                # 0  test_remat.py:24
  %t_1: f32[16, 4] = t(%_0_down_weight)                                         # 0.down  test_remat.py:24
backward:
  %t_12: f32[4, s0] = t(%mm_7)                                                  # 0.down  test_remat.py:24
  %mm_8: f32[4, 16] = mm(%t_12, %gelu)                                          # 0.down  test_remat.py:24
  %t_13: f32[16, 4] = t(%mm_8)                                                  # 0.down  test_remat.py:24
  %t_14: f32[4, 16] = t(%t_1)                                                   # 0.down  test_remat.py:24
  %mm_9: f32[s0, 16] = mm(%mm_7, %t_14)                                         # 0.down  test_remat.py:24
  %t_15: f32[4, 16] = t(%t_13)                                                  # 0.down  test_remat.py:24  of %t_1
  %gelu_backward_1: f32[s0, 16] = gelu_backward(%mm_9, %mm)                     # 0  test_remat.py:24  of %gelu
  %t_16: f32[16, s0] = t(%gelu_backward_1)                                      # 0.up  test_remat.py:24  of %mm
  %mm_10: f32[16, 4] = mm(%t_16, %_0)                                           # 0.up  test_remat.py:24  of %mm
  %t_17: f32[4, 16] = t(%mm_10)                                                 # 0.up  test_remat.py:24  of %mm
  %t_18: f32[16, 4] = t(%t_17)                                                  # 0.up  test_remat.py:24
return grad 0.up.weight = %t_18
return grad 0.down.weight = %t_15
""",
        )


def test_what_is_computed_again_is_bitwise_what_was_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    for model in (nn.Sequential(Block(), Block()), nn.Sequential(Dropped(), Dropped())):
        x = torch.randn(3, 4)
        joint = joint_of(model, square_loss, (x,))
        given = inputs_of(joint, model, (x,))
        lean = run_staged(partition(joint, 2, ["1"]), given).results
        full = run_staged(kept_everything(monkeypatch, model, x), given).results
        assert lean.keys() == full.keys()
        assert all(torch.equal(lean[what], full[what]) for what in lean)


def test_the_largest_value_of_a_block_is_kept_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = nn.Sequential(Block(), Block()), torch.randn(3, 4)
    lean = partition(joint_of(model, square_loss, (x,)), 2, ["1"]).stages[0]
    full = kept_everything(monkeypatch, model, x).stages[0]
    assert saved_bytes(full) - saved_bytes(lean) == 3 * 16 * 4  # gelu's result, float32


def test_draws_are_never_repeated() -> None:
    joint = joint_of(nn.Sequential(Dropped(), Dropped()), square_loss, (torch.randn(3, 4),))
    stage = partition(joint, 2, ["1"]).stages[0]
    assert stage.backward is not None
    targets = [str(node.target) for node in stage.backward.calls()]
    assert not any("dropout.default" in target or "rand" in target or "bernoulli" in target for target in targets)
