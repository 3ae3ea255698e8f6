"""Eight linear layers; layer k's output is added to layer 9-k's input. The count is a plain size."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from graphcomp.losses import TokenLoss
from tests.zoo.case import Case


class UShape(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.up = nn.ModuleList(nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for layer in self.down:
            x = torch.tanh(layer(x))
            skips.append(x)
        for layer in self.up:
            x = torch.tanh(layer(x + skips.pop()))
        return x


def loss_fn(output: Tensor, batch: dict[str, Tensor]) -> TokenLoss:
    return TokenLoss((output - batch["y"]).square().sum(), batch["y"].numel())


def make(n: int, generator: torch.Generator, dtype: torch.dtype) -> list[dict[str, Tensor]]:
    rows = [2 + (3 * i) % 5 for i in range(n)]
    return [{name: torch.randn(r, 16, generator=generator).to(dtype) for name in ("x", "y")} for r in rows]


CASE = Case("u_shape", UShape, loss_fn, make, ragged=True)
