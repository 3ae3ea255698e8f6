"""A small decoder with all that a checkpoint has to carry: tied weights, dropout, both kinds of buffers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import graphcomp as gc
from graphcomp import Plan

VOCAB, WIDTH, LENGTH, ROWS = 13, 6, 5, 3


class Scale(nn.Module):
    """Buffers that need an initialisation, one of them not persistent, and a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("factor", torch.empty(WIDTH))
        self.register_buffer("ramp", torch.empty(WIDTH), persistent=False)
        self.shift = nn.Parameter(torch.empty(WIDTH), requires_grad=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.factor.fill_(0.5)
            self.ramp.copy_(torch.arange(WIDTH))
            nn.init.normal_(self.shift)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor + 0.01 * self.ramp + self.shift


class Decoder(nn.Module):
    """5 rows of the last layer, and 7 of another, that no number of ranks divides; one that nobody uses."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 7), nn.ReLU(), nn.Dropout(dropout), nn.Linear(7, WIDTH)) for _ in range(4)
        )
        self.scale = Scale()
        self.norm = nn.LayerNorm(WIDTH)
        self.unused = nn.Linear(2, 5)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(self.norm(self.scale(x)))


def loss_fn(logits: Tensor, batch: dict[str, Tensor]) -> Any:
    return gc.token_loss(logits, batch["labels"])


def decoder(dropout: float = 0.1, seed: int = 0) -> Decoder:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Decoder(dropout).double()


def meta_decoder(dropout: float = 0.1) -> Decoder:
    with torch.device("meta"):
        return Decoder(dropout).double()


def batches(step: int, number: int = 4) -> list[dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(step)
    shape = (number, ROWS, LENGTH)
    tokens, labels = (torch.randint(VOCAB, shape, generator=draw) for _ in range(2))
    return [{"tokens": one, "labels": other} for one, other in zip(tokens, labels, strict=True)]


def step_of(model: nn.Module, **options: Any) -> gc.CompiledStep:
    plan = Plan(**{"backend": "eager", "quiet": True, "deadline": 60.0, **options})
    return gc.compile_train_step(model, loss_fn, plan=plan)


class Trainer:
    """A step, AdamW in two groups, and a scheduler: what a script has."""

    def __init__(self, step: gc.CompiledStep, kind: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW) -> None:
        self.step = step
        named = list(step.named_parameters())
        groups = [
            {"params": [p for name, p in named if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for name, p in named if p.dim() <= 1], "weight_decay": 0.0},
        ]
        self.optimizer = kind(groups, lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, gamma=0.5)

    def train(self, steps: Sequence[int], place: slice = slice(None)) -> list[float]:
        """Steps over their microbatches, or this data rank's part of them."""
        losses = []
        for number in steps:
            losses.append(float(self.step(batches(number)[place]).loss))
            gc.clip_grad_norm_(self.step, 1.0)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
        return losses

    def save(self, folder: Any) -> None:
        gc.checkpoint.save(self.step, folder, self.optimizer, self.scheduler.state_dict())

    def load(self, folder: Any, **options: Any) -> None:
        self.scheduler.load_state_dict(gc.checkpoint.load(self.step, folder, self.optimizer, **options))
