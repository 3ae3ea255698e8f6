"""Models that a compiled step cannot honour are refused by name, and leave nothing behind."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from graphcomp import Plan, testing
from graphcomp.errors import StateError


class TrainedBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.register_buffer("gain", torch.ones(4, requires_grad=True))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight * self.gain


class OverlappingBuffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.register_buffer("whole", torch.zeros(4))
        self.register_buffer("part", self.whole[:2])

    def forward(self, x: Tensor) -> Tensor:
        self.whole.add_(1)
        return x @ self.weight * self.part.sum()


def run(model: nn.Module) -> None:
    testing.run_virtual(model, lambda o, b: o.sum(), [torch.ones(3, 4)], plan=Plan(backend="eager"))


def test_a_buffer_that_requires_a_gradient() -> None:
    with pytest.raises(StateError, match="buffer 'gain' requires a gradient"):
        run(TrainedBuffer())


def test_a_written_buffer_that_another_one_is_a_view_of() -> None:
    model = OverlappingBuffers()
    with pytest.raises(StateError, match="buffer 'whole' is written in forward and shares memory with 'part'"):
        run(model)
    assert torch.equal(model.whole, torch.zeros(4))
