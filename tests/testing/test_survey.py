"""The survey says what became of a model: equal, refused, or both, and what would be sent."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from graphcomp import TokenLoss
from graphcomp.testing import survey
from graphcomp.testing.survey import Crossing


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4)
        self.last = nn.Linear(4, 4, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.second(torch.tanh(self.first(x)))))


class Asks(Small):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * x.sum().item()


def total(y: Tensor, batch: Tensor) -> TokenLoss:
    return TokenLoss(y.square().sum(), batch.shape[0])


BATCHES = [torch.randn(rows, 4) for rows in (3, 5)]


def test_a_model_that_passes() -> None:
    model = Small()
    found = survey(model, total, BATCHES, stages=(1, 2))
    assert found.passed and found.stages == (1, 2) and found.error < 1e-6 and found.tied is True
    assert found.captures == 1 and found.seconds > 0 and found.nodes > 10 and found.name == "Small"
    down, up = found.crossings
    assert (down.stages, down.source, down.target) == (2, 0, 1) and (up.source, up.target) == (1, 0)
    assert [value.partition(": ")[2] for value in (*down.values, *up.values)] == ["f32[s0, 4]"] * 2
    assert str(Crossing(2, 0, 1, ("h: f32[s0, 4]",))) in str(found).replace(down.values[0], "h: f32[s0, 4]")
    assert all(parameter.grad is None for parameter in model.parameters())


def test_numbers_of_stages_that_are_too_many() -> None:
    found = survey(Small(), total, BATCHES, stages=(2, 9), name="mine")
    assert not found.passed and found.stages == (2,) and found.name == "mine"
    assert found.refused is not None and found.refused.startswith("9 stages: PartitionError: ")
    assert "refused at 9 stages" in str(found)


def test_a_model_that_is_refused() -> None:
    found = survey(Asks(), total, BATCHES, stages=(1, 2))
    assert not found.passed and found.stages == () and found.captures == 0
    assert found.refused is not None and found.refused.startswith("1 stage: CaptureError: the code decides on")


def test_a_difference_is_a_reason_too() -> None:
    class Odd(torch.autograd.Function):
        """In eager mode alone the gradient is another one."""

        calls = 0

        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, gradient: Tensor) -> Tensor:
            Odd.calls += 1
            return gradient * (1 if Odd.calls == 1 else 2)

    found = survey(Small(), lambda y, batch: total(Odd.apply(y), batch), BATCHES, stages=(1,))
    assert found.refused is not None and found.refused.startswith("1 stage: ParityError: ")
