"""A plain classifier. A microbatch is a tuple (inputs, labels); the number of rows differs."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from graphcomp.losses import TokenLoss, metric, token_loss
from tests.zoo.case import Case


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(12, 32),
            nn.ReLU(),
            nn.Linear(32, 32),
            nn.GELU(),
            nn.Linear(32, 32),
            nn.Tanh(),
            nn.Linear(32, 5),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def loss_fn(output: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[TokenLoss, dict]:
    right = output.argmax(-1) == batch[1]
    return token_loss(output, batch[1]), {
        "right": metric(right.sum(), "sum"),
        "peak": metric(output.max(), "max"),
    }


def make(n: int, generator: torch.Generator, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    rows = [3 + (5 * i) % 7 for i in range(n)]
    return [
        (torch.randn(r, 12, generator=generator).to(dtype), torch.randint(5, (r,), generator=generator)) for r in rows
    ]


CASE = Case("mlp", MLP, loss_fn, make, ragged=True)
