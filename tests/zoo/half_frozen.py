"""The embeddings and the first half of the blocks are frozen."""

from __future__ import annotations

from tests.zoo.case import Case
from tests.zoo.gpt import TinyGPT, loss_fn, make


class HalfFrozenGPT(TinyGPT):
    def __init__(self) -> None:
        super().__init__()
        for part in (self.embed, self.positions, *self.blocks[:2]):
            part.requires_grad_(False)


CASE = Case("half_frozen", HalfFrozenGPT, loss_fn, make)
