"""Buffers are changed once for each microbatch, in order, and are seen in the user's own model."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from graphcomp import TokenLoss
from graphcomp.errors import StateError
from tests.cases.tiny import LAYOUTS, SCHEDULES, assert_equal, step_of, tiny_gpt


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.norm = nn.BatchNorm1d(4, momentum=0.1, affine=False)
        self.register_buffer("steps", torch.tensor(40_840))

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        x = self.norm(x)
        for layer in self.layers:
            x = layer(x)
        return x


def total(y: Tensor, batch: Tensor) -> TokenLoss:
    return TokenLoss(y.square().sum(), batch.numel())


@pytest.mark.parametrize(("stages", "schedule"), [*LAYOUTS[:4], (3, "1f1b")])
def test_running_means_and_counters(stages: int, schedule: str) -> None:
    model = tiny_gpt(Normed)
    step = step_of(model, total, stages, schedule)
    assert_equal(model, total, [torch.zeros(3, 4), torch.full((5, 4), 4.0)], step)
    state = model.state_dict()
    assert torch.equal(state["norm.running_mean"], torch.full((4,), 0.4))
    assert int(state["norm.num_batches_tracked"]) == 2
    assert state["steps"].dtype is torch.int64 and int(state["steps"]) == 40_842
    for _ in range(3):
        step.run([torch.zeros(3, 4), torch.full((5, 4), 4.0)])
    assert int(state["steps"]) == 40_848  # the same tensor, written again


class Remembers(nn.Module):
    """A running value that enters the result; written by assignment, in place and through a slice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("history", torch.zeros(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        self.history[1:] = self.history[:-1].clone()
        self.history[0] = self.mean
        return self.second(x - self.mean + self.history.sum(0))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("split", [[], ["second"]], ids=str)
def test_a_buffer_that_the_result_depends_on(split: list[str], schedule: str) -> None:
    model = tiny_gpt(Remembers)
    step = step_of(model, total, schedule=schedule, **({"split": split} if split else {}))
    for _ in range(2):
        assert_equal(model, total, [torch.randn(rows, 4) for rows in (3, 5, 2)], step)


class WritesLate(nn.Module):
    """The first layer reads what the last one writes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x - self.mean))
        x = self.second(x)
        self.mean.copy_(x.detach().mean(0))
        return x


def test_a_buffer_that_goes_back_over_a_cut_is_refused_by_name() -> None:
    model = tiny_gpt(WritesLate)
    with pytest.raises(StateError, match="buffer 'mean' is written on stage 1 and read on stage 0") as caught:
        step_of(model, total, split=["second"]).run([torch.randn(3, 4)])
    assert "Plan(split=...)" in str(caught.value)
    assert not model.mean.count_nonzero()
    assert_equal(model, total, [torch.randn(3, 4), torch.randn(2, 4)], step_of(model, total))
