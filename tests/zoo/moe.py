"""Experts in a Python loop with dense weights, and a load-balancing term as an auxiliary mean loss."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from graphcomp.losses import mean_loss, metric, token_loss
from tests.zoo.case import VOCAB, Case
from tests.zoo.gpt import make


class MoE(nn.Module):
    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(experts))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        chances = self.router(x).softmax(-1)
        best, chosen = chances.topk(2, dim=-1)
        mixed = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            weight = (best * (chosen == number)).sum(-1, keepdim=True)
            mixed = mixed + weight * torch.relu(expert(x))
        load = chances.mean(dim=(0, 1))
        return mixed, (load * load).sum() * len(self.experts)


class MoEModel(nn.Module):
    def __init__(self, width: int = 16, blocks: int = 3, experts: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.blocks = nn.ModuleList(MoE(width, experts) for _ in range(blocks))
        self.head = nn.Linear(width, VOCAB)

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        x, balance = self.embed(tokens), torch.zeros((), dtype=self.head.weight.dtype, device=tokens.device)
        for block in self.blocks:
            mixed, term = block(x)
            x, balance = x + mixed, balance + term
        return {"logits": self.head(x), "balance": balance}


def loss_fn(output: dict[str, Tensor], batch: dict[str, Tensor]) -> tuple[dict, dict]:
    losses = {
        "lm": token_loss(output["logits"], batch["labels"]),
        "balance": mean_loss(0.01 * output["balance"]),
    }
    return losses, {"balance": output["balance"], "last_balance": metric(output["balance"], "last")}


CASE = Case("moe", MoEModel, loss_fn, make)
