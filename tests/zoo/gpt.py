"""A pre-norm decoder with an untied head; all microbatches of one shape."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graphcomp.losses import TokenLoss, token_loss
from tests.zoo.case import VOCAB, Case, labels, tokens

BLOCKS = 2
"""Many tests capture these decoders: more would only take longer."""


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        q, k, v = (
            part.view(rows, length, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(x).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(rows, length, width))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class TinyGPT(nn.Module):
    def __init__(self, vocab: int = VOCAB, width: int = 32, heads: int = 4, blocks: int = BLOCKS) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.positions = nn.Embedding(64, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.embed(tokens) + self.positions(places)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss_fn(logits: Tensor, batch: dict[str, Tensor]) -> TokenLoss:
    return token_loss(logits, batch["labels"])


def make(n: int, generator: torch.Generator, dtype: torch.dtype) -> list[dict[str, Tensor]]:
    return [{"tokens": tokens(2, 16, generator), "labels": labels(2, 16, generator)} for _ in range(n)]


CASE = Case("gpt", TinyGPT, loss_fn, make)
