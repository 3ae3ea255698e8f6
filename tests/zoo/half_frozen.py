"""The embeddings and the first half of the blocks are frozen."""

from __future__ import annotations

from tests.zoo.case import Case
from tests.zoo.gpt import BLOCKS, TinyGPT, loss_fn, make


class HalfFrozenGPT(TinyGPT):
    def __init__(self, blocks: int = BLOCKS) -> None:
        super().__init__(blocks=blocks)
        for part in (self.embed, self.positions, *self.blocks[: blocks // 2]):
            part.requires_grad_(False)


CASE = Case("half_frozen", HalfFrozenGPT, loss_fn, make)
