"""Parameters of several stages, buffers across stages, counts that must come first."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from graphcomp.errors import LossError, StateError
from graphcomp.ir import signature as role
from graphcomp.losses import TokenLoss
from graphcomp.partition import partition
from tests.partition.running import check, joint_of, square_loss
from tests.zoo import ZOO
from tests.zoo.gpt import TinyGPT


def test_a_tied_weight_is_on_both_stages_and_its_gradient_is_split() -> None:
    case = ZOO["tied_gpt"]
    cut = check(case.build(), case.loss_fn, case.microbatches(2), 3)
    assert {name: where for name, where in cut.parameter_stages.items() if len(where) > 1} == {"embed.weight": (0, 2)}
    held = [s.index for s in cut.stages if s.backward and role.Grad("embed.weight") in s.backward.outputs]
    assert held == [0, 2]


def test_every_parameter_is_on_the_stage_that_uses_it() -> None:
    case = ZOO["gpt"]
    model = TinyGPT(blocks=4)
    cut = check(model, case.loss_fn, case.microbatches(1), 4)
    assert sorted(cut.parameter_stages) == sorted(name for name, _ in model.named_parameters())
    assert all(cut.parameter_stages[f"blocks.{i}.norm1.weight"] == (i,) for i in range(4))


class Counter(nn.Module):
    """Keeps a running mean; `late` reads it again in the last layer."""

    def __init__(self, late: bool, before: bool = False) -> None:
        super().__init__()
        self.late, self.before = late, before
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("level", torch.zeros(4))
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x) * self.scale
        if self.before:
            x = x + self.level
        if not self.late:
            self.level.mul_(0.5).add_(x.detach().mean(0))
        x = self.second(x) * self.scale
        if self.late:
            self.level.mul_(0.5).add_(x.detach().mean(0))
        return x


def batches() -> list[tuple[Tensor]]:
    return [(torch.randn(3, 4),), (torch.randn(5, 4),)]


def test_a_buffer_that_nobody_writes_is_read_by_all_stages() -> None:
    cut = check(Counter(late=False), square_loss, batches(), split=["second"])
    assert all(role.Buffer("scale") in stage.forward.inputs for stage in cut.stages)
    assert role.BufferUpdate("level") in cut.stages[0].forward.outputs


def test_a_buffer_written_on_one_stage_and_read_on_another_is_refused() -> None:
    joint = joint_of(Counter(late=True, before=True), square_loss, batches()[0])
    with pytest.raises(StateError, match="buffer 'level' is written on stage 1 and read on stage 0"):
        partition(joint, split=["second"])
    assert len(partition(joint, 1).stages) == 1


def test_a_count_that_depends_on_a_parameter_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def loss_fn(output: Tensor, batch: object) -> TokenLoss:
        return TokenLoss(output.square().sum(), (output.detach() > 0).sum())

    joint = joint_of(model, loss_fn, batches()[0])
    with pytest.raises(LossError) as caught:
        partition(joint, 2)
    text = str(caught.value)
    assert "the token count of loss 'loss' depends on more than the batch" in text
    assert "on param 1.weight" in text and "count the tokens from the labels" in text


def test_the_prologue_reads_the_batch_alone() -> None:
    case = ZOO["two_losses"]
    cut = check(case.build(), case.loss_fn, case.microbatches(2), 2)
    assert cut.prologue is not None
    assert set(cut.prologue.outputs) == {role.Tokens("lm"), role.Tokens("value")}
    assert all(isinstance(what, role.BatchLeaf | role.Size) for what in cut.prologue.inputs)
