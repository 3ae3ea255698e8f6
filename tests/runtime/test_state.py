"""Buffers are written at the end of a step, all from what they held before it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import graphcomp as gc


class Swaps(nn.Module):
    """New values of buffers are other buffers as they were, in both orders of registration."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        for number, name in enumerate(("now", "before", "left", "right")):
            self.register_buffer(name, torch.full((), float(number)))

    def forward(self, x: Tensor) -> Tensor:
        self.before, self.now = self.now, self.now + 1
        self.left, self.right = self.right, self.left
        return self.layers(x)


@pytest.mark.parametrize("microbatches", [1, 2, 3])
def test_a_buffer_takes_over_the_old_value_of_another(microbatches: int) -> None:
    batches = [torch.ones(3, 4)] * microbatches
    eager, model = Swaps(), Swaps()
    for batch in batches:
        eager(batch)
    step = gc.compile_train_step(
        model, lambda output, batch: output.square().mean(), plan=gc.Plan(backend="eager", quiet=True)
    )
    step(batches)
    assert list(map(float, model.buffers())) == list(map(float, eager.buffers()))
