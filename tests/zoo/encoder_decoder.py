"""Two encoder and two decoder blocks; each decoder block reads the encoder's output. Both lengths differ."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.case import VOCAB, Case, labels, tokens
from tests.zoo.gpt import Attention, loss_fn


class CrossAttention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(self.query(x), self.key(memory), self.value(memory))


class EncoderBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.attention = CrossAttention(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x, x)
        return x + self.mlp(self.norm(x))


class DecoderBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads=2)
        self.cross = CrossAttention(width)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.cross(self.norm2(x), memory)


class EncoderDecoder(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.encoder = nn.ModuleList(EncoderBlock(width) for _ in range(2))
        self.decoder = nn.ModuleList(DecoderBlock(width) for _ in range(2))
        self.head = nn.Linear(width, VOCAB)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory = self.embed(source)
        for block in self.encoder:
            memory = block(memory)
        x = self.embed(target)
        for block in self.decoder:
            x = block(x, memory)
        return self.head(x)


def make(n: int, generator: torch.Generator, dtype: torch.dtype) -> list[dict[str, Tensor]]:
    found = []
    for i in range(n):
        source, target = 5 + (4 * i) % 9, 3 + (7 * i) % 11
        found.append(
            {
                "source": tokens(2, source, generator),
                "target": tokens(2, target, generator),
                "labels": labels(2, target, generator),
            }
        )
    return found


CASE = Case("encoder_decoder", EncoderDecoder, loss_fn, make, ragged=True)
