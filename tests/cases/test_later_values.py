"""Gradient hooks that read what a later stage computes: its forward value comes up to an earlier stage's backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphcomp import TokenLoss
from graphcomp.plan import SCHEDULES
from tests.cases.tiny import assert_equal, step_of, tiny_gpt


class Scaled(nn.Module):
    """The gradient of the first layer's output is scaled by what the last layer yields."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = (nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).tanh()
        later: list[Tensor] = []
        if h.requires_grad:
            h.register_hook(lambda gradient: gradient * later[0] + later[1].mean())
        wide = self.middle(h).sigmoid()
        out = self.last(wide).exp()
        later += [out.detach(), wide.detach()]
        return out


def total(output: Tensor, batch: Tensor) -> Any:
    return TokenLoss(output.square().sum(), batch.shape[0])


SPLITS = (["middle"], ["last"], ["middle", "last"])
RUNS = [(split, schedule) for split in SPLITS for schedule in SCHEDULES]


# Three stages are not divided among ranks of two.
@pytest.mark.parametrize(
    ("split", "schedule"), [run for run in RUNS if run != (SPLITS[2], "interleaved-1f1b")], ids=str
)
def test_a_hook_reads_what_a_later_stage_computes(split: list[str], schedule: str) -> None:
    model = tiny_gpt(Scaled).double()
    step = step_of(model, total, split=split, schedule=schedule)
    assert_equal(model, total, [torch.randn(n, 6).double() for n in (3, 5, 2)], step, 1e-12)
