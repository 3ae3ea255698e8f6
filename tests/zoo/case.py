"""What a zoo model is: how to build it, its loss function, and microbatches for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

VOCAB = 64
IGNORED = -100


@dataclass(frozen=True)
class Case:
    """A tiny model as its author would write it, with a loss function and data.

    build: seed -> model in fp32 and training mode; move it with `.to(torch.float64)`.
    loss_fn: (output, batch) -> whatever a loss function may return.
    make: (number, generator, dtype) -> microbatches; floating leaves have that dtype.
    ragged: sizes differ between microbatches.
    random: the forward draws random numbers.
    """

    name: str
    make_model: Callable[[], nn.Module]
    loss_fn: Callable[[Any, Any], Any]
    make: Callable[[int, torch.Generator, torch.dtype], list[Any]]
    ragged: bool = False
    random: bool = False

    def build(self, seed: int = 0) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return self.make_model()

    def microbatches(self, n: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> list[Any]:
        return self.make(n, torch.Generator().manual_seed(seed), dtype)


def tokens(rows: int, length: int, generator: torch.Generator) -> Tensor:
    return torch.randint(VOCAB, (rows, length), generator=generator)


def labels(rows: int, length: int, generator: torch.Generator) -> Tensor:
    """Random labels, about a third of them ignored, so that microbatches weigh differently."""
    found = tokens(rows, length, generator)
    return found.masked_fill(torch.rand(rows, length, generator=generator) < 0.3, IGNORED)
