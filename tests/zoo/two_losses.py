"""A second head from the middle of the model, with its own loss and its own number of tokens."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from graphcomp.losses import TokenLoss, token_loss
from tests.zoo import gpt
from tests.zoo.case import Case


class TwoHeads(gpt.TinyGPT):
    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Linear(32, 1)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embed(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks[: gpt.BLOCKS // 2]:
            x = block(x)
        values = self.value(x).squeeze(-1)
        for block in self.blocks[gpt.BLOCKS // 2 :]:
            x = block(x)
        return self.head(self.norm(x)), values


def loss_fn(output: tuple[Tensor, Tensor], batch: dict[str, Tensor]) -> dict[str, TokenLoss]:
    logits, values = output
    wrong = (values - batch["values"]).square() * batch["weights"]
    return {"lm": token_loss(logits, batch["labels"]), "value": TokenLoss(wrong.sum(), batch["weights"])}


def make(n: int, generator: torch.Generator, dtype: torch.dtype) -> list[dict[str, Tensor]]:
    found = gpt.make(n, generator, dtype)
    for batch in found:
        shape = batch["tokens"].shape
        batch["values"] = torch.randn(shape, generator=generator).to(dtype)
        batch["weights"] = (torch.rand(shape, generator=generator) < 0.2).to(dtype)
    return found


CASE = Case("two_losses", TwoHeads, loss_fn, make)
