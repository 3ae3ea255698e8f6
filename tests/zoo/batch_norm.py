"""Buffers that every microbatch changes, in order."""

from __future__ import annotations

from torch import Tensor, nn

from tests.zoo.case import Case
from tests.zoo.mlp import loss_fn, make


class NormNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 32)
        self.norm1 = nn.BatchNorm1d(32)
        self.second = nn.Linear(32, 32)
        self.norm2 = nn.BatchNorm1d(32, momentum=0.3)
        self.third = nn.Linear(32, 32)
        self.last = nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(self.first(x)).relu()
        x = self.norm2(self.second(x)).relu()
        return self.last(self.third(x).relu())


CASE = Case("batch_norm", NormNet, loss_fn, make, ragged=True)
