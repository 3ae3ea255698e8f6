"""The head shares its weight with the embedding."""

from __future__ import annotations

from tests.zoo.case import Case
from tests.zoo.gpt import BLOCKS, TinyGPT, loss_fn, make


class TiedGPT(TinyGPT):
    def __init__(self, blocks: int = BLOCKS) -> None:
        super().__init__(blocks=blocks)
        self.head.weight = self.embed.weight


CASE = Case("tied_gpt", TiedGPT, loss_fn, make)
