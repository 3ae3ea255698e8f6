"""Dropout between all layers: the mask of the backward must be that of the forward."""

from __future__ import annotations

from torch import Tensor, nn

from tests.zoo.case import Case
from tests.zoo.mlp import loss_fn, make


class DropoutNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 32)
        self.hidden = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.last = nn.Linear(32, 5)
        self.drop = nn.Dropout(0.25)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.first(x).relu())
        for layer in self.hidden:
            x = x + self.drop(layer(x).relu())
        return self.last(x)


CASE = Case("dropout", DropoutNet, loss_fn, make, ragged=True, random=True)
