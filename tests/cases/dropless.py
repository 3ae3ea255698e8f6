"""A dropless mixture of experts: every row goes to the rank that computes its expert, and comes back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import graphcomp as gc

WIDTH, EXPERTS = 4, 6


class Experts(nn.Module):
    """Sort rows by expert, exchange counts, exact exchange, experts, exchange back, unsort.

    group: None computes the same in one process. Every rank holds all experts and computes its share of them.
    """

    def __init__(self, group: Any = None, size: int = 1) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / 2)
        self.group, self.size = group, size

    def forward(self, h: Tensor, lean: Tensor) -> Tensor:
        weight, expert = (self.router(h) + lean).softmax(-1).max(-1)
        order = expert.argsort(stable=True)
        rows, ids = h[order], expert[order]
        if self.group is None:
            computed = self.computed(rows, ids)
        else:
            sent = nn.functional.one_hot(expert, EXPERTS).sum(0).view(self.size, -1).sum(1)
            received = gc.collectives.all_to_all(sent, self.group)
            there = gc.collectives.all_to_all(rows, self.group, received, sent)
            of = gc.collectives.all_to_all(ids, self.group, received, sent)
            computed = gc.collectives.all_to_all(self.computed(there, of), self.group, sent, received)
        return torch.zeros_like(h).index_copy_(0, order, computed) * weight[:, None]

    def computed(self, rows: Tensor, ids: Tensor) -> Tensor:
        return torch.bmm(rows[:, None], self.up[ids]).squeeze(1).tanh()


class Grouped(Experts):
    """One product for all experts of this rank, over rows in the order of experts."""

    def computed(self, rows: Tensor, ids: Tensor) -> Tensor:
        order = ids.argsort(stable=True)
        ends = nn.functional.one_hot(ids, EXPERTS).sum(0).cumsum(0).to(torch.int32)
        products = nn.functional.grouped_mm(rows[order], self.up, offs=ends)
        return torch.empty_like(products).index_copy(0, order, products).tanh()


class Dropless(nn.Module):
    """again: the experts are a checkpointed region."""

    def __init__(self, group: Any = None, size: int = 1, again: bool = False) -> None:
        super().__init__()
        self.first, self.experts, self.last = nn.Linear(WIDTH, WIDTH), Experts(group, size), nn.Linear(WIDTH, 1)
        self.again = again

    def forward(self, x: Tensor, lean: Tensor) -> Tensor:
        h = self.first(x).tanh()
        mixed = checkpoint(self.experts, h, lean, use_reentrant=False) if self.again else self.experts(h, lean)
        return self.last(h + mixed)


def squares(output: Tensor, batch: Any) -> gc.TokenLoss:
    return gc.TokenLoss((output - batch["y"]).square().sum(), torch.ones_like(batch["y"]).sum())


def build(group: Any = None, size: int = 1, again: bool = False) -> Dropless:
    torch.manual_seed(0)
    return Dropless(group, size, again).double()


def batch_of(rank: int, number: int, rows: int, experts: Sequence[int] | None = None) -> dict[str, Tensor]:
    """experts: the only ones that rows go to."""
    generator = torch.Generator().manual_seed(10 * rank + number)
    lean = torch.zeros(rows, EXPERTS, dtype=torch.float64)
    if experts is not None:
        lean -= 100
        lean[:, list(experts)] += 100
    return {
        "x": torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64),
        "lean": lean,
        "y": torch.randn(rows, 1, generator=generator, dtype=torch.float64),
    }


def reference(batches: Sequence[dict[str, Tensor]]) -> tuple[float, dict[str, Tensor]]:
    """One process, all microbatches of all ranks: the mean over all rows, and its gradients."""
    model = build()
    total = torch.stack([squares(model(b["x"], b["lean"]), b).total for b in batches]).sum()
    loss = total / sum(b["x"].shape[0] for b in batches)
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
