"""The head shares its weight with the embedding."""

from __future__ import annotations

from tests.zoo.case import Case
from tests.zoo.gpt import TinyGPT, loss_fn, make


class TiedGPT(TinyGPT):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight


CASE = Case("tied_gpt", TiedGPT, loss_fn, make)
