"""Programs with functions that an operator takes."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from graphcomp.capture import capture
from graphcomp.compiler import joint_passes
from graphcomp.ir.program import Program
from graphcomp.losses import TokenLoss
from graphcomp.passes.manager import PassManager


class Attention(torch.nn.Module):
    """Twice the same attention with a learned slope; `power`: what tells two kinds apart."""

    def __init__(self, power: float = 2.0, twice: bool = True) -> None:
        super().__init__()
        self.slope = torch.nn.Parameter(torch.ones(2, dtype=torch.float64))
        self.power, self.twice = power, twice

    def forward(self, x: Tensor) -> Tensor:
        def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return s - self.slope[h] * (i - j).abs() ** self.power

        y = flex_attention(x, x, x, score)
        return y + flex_attention(x, x, x, score) if self.twice else y


def total(y: Tensor, batch: Tensor) -> TokenLoss:
    return TokenLoss(y.square().sum(), batch.shape[0])


def example(rows: int = 3, length: int = 5) -> Tensor:
    return torch.randn(rows, 2, length, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def attention(power: float = 2.0, twice: bool = True) -> Program:
    """The joint program, after the passes that all programs go through."""
    joint = capture(Attention(power, twice), total, example())
    return PassManager(joint_passes(False)).run(joint.program)


def calls(program: Program, name: str) -> list[torch.fx.Node]:
    return [node for node in program.calls() if getattr(node.target, "__name__", "") == name]
