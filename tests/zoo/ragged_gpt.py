"""The decoder with another length, and sometimes another number of rows, in every microbatch."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.zoo.case import Case, labels, tokens
from tests.zoo.gpt import TinyGPT, loss_fn


def make(n: int, generator: torch.Generator, dtype: torch.dtype) -> list[dict[str, Tensor]]:
    shapes = [(2 + i % 2, 4 + (11 * i + 5) % 20) for i in range(n)]
    return [{"tokens": tokens(*shape, generator), "labels": labels(*shape, generator)} for shape in shapes]


CASE = Case("ragged_gpt", TinyGPT, loss_fn, make, ragged=True)
