"""Counts of tokens that need more than the batch, and norms of a batch that keep no statistics."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphcomp import TokenLoss
from tests.cases.tiny import assert_equal, step_of, tiny_gpt


class Layers(nn.Module):
    def __init__(self, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 6, bias=False), norm or nn.Identity(), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)).tanh())


def batches() -> list[Tensor]:
    return [torch.randn(n, 6).double() for n in (3, 5, 4)]


@pytest.mark.parametrize("stages", [1, 2])
def test_a_count_that_needs_other_tensors(stages: int) -> None:
    """One from outside, which is read anew at each step, and one made of numbers."""
    outside = torch.tensor([1.0, 0.5, 0.0, 2.0, 1.0, 1.0], dtype=torch.float64)

    def loss(output: Tensor, batch: Tensor) -> Any:
        weights = outside * torch.tensor([1.0, 1.0, 1.0, 3.0, 1.0, 1.0], dtype=torch.float64)
        each = weights.expand(batch.shape) * (batch > 0)
        return TokenLoss((output.square() * each).sum(), each)

    model = tiny_gpt(Layers).double()
    step = step_of(model, loss, stages)
    for _ in range(2):
        assert_equal(model, loss, batches(), step, 1e-12)
        outside += 1.0
    assert step.compiler.traces == 1


NORMS = {
    "batch": lambda: nn.BatchNorm1d(6, track_running_stats=False),
    "batch, no weights": lambda: nn.BatchNorm1d(6, affine=False, track_running_stats=False),
}


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("name", NORMS)
def test_norms_of_a_batch(name: str, stages: int) -> None:
    def loss(output: Tensor, batch: Tensor) -> Any:
        return TokenLoss(output.square().sum(), batch.shape[0])

    model = tiny_gpt(lambda: Layers(NORMS[name]())).double()
    step = step_of(model, loss, stages)
    assert_equal(model, loss, batches(), step, 1e-11)
    model.eval()
    assert_equal(model, loss, batches(), step, 1e-11)
