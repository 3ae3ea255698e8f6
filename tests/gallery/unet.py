"""A small U-Net that predicts the noise in an image, as diffusion models are built: convolutions, skips, attention."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graphcomp import TokenLoss


def time_features(times: Tensor, width: int) -> Tensor:
    rates = torch.exp(-math.log(10_000.0) * torch.arange(width // 2, device=times.device) / (width // 2))
    angles = times[:, None].float() * rates
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


class Residual(nn.Module):
    def __init__(self, given: int, width: int, time: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.GroupNorm(4, given), nn.SiLU(), nn.Conv2d(given, width, 3, padding=1))
        self.time = nn.Linear(time, width)
        self.second = nn.Sequential(nn.GroupNorm(4, width), nn.SiLU(), nn.Conv2d(width, width, 3, padding=1))
        self.skip = nn.Conv2d(given, width, 1) if given != width else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        h = self.first(x) + self.time(F.silu(time))[:, :, None, None]
        return self.second(h) + self.skip(x)


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.GroupNorm(4, width), nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, width, height, across = x.shape
        flat = self.norm(x).flatten(2).mT
        query, key, value = self.qkv(flat).chunk(3, dim=-1)
        mixed = F.scaled_dot_product_attention(query, key, value)
        return x + self.out(mixed).mT.reshape(rows, width, height, across)


class UNet(nn.Module):
    def __init__(self, width: int = 8, time: int = 16) -> None:
        super().__init__()
        widths = [width, 2 * width, 4 * width]
        self.width = width
        self.time = nn.Sequential(nn.Linear(width, time), nn.SiLU(), nn.Linear(time, time))
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList(Residual(a, b, time) for a, b in pairwise(widths))
        self.shrink = nn.ModuleList(nn.Conv2d(each, each, 3, stride=2, padding=1) for each in widths[1:])
        self.middle = nn.ModuleList([Residual(widths[-1], widths[-1], time), Residual(widths[-1], widths[-1], time)])
        self.attention = Attention(widths[-1])
        self.up = nn.ModuleList(Residual(2 * b, a, time) for a, b in reversed(list(pairwise(widths))))
        self.head = nn.Sequential(nn.GroupNorm(4, width), nn.SiLU(), nn.Conv2d(width, 3, 3, padding=1))

    def forward(self, image: Tensor, times: Tensor) -> Tensor:
        time = self.time(time_features(times, self.width))
        x, skips = self.stem(image), []
        for block, shrink in zip(self.down, self.shrink, strict=True):
            x = block(x, time)
            skips.append(x)
            x = shrink(x)
        x = self.middle[1](self.attention(self.middle[0](x, time)), time)
        for block in self.up:
            skip = skips.pop()
            x = F.interpolate(x, size=skip.shape[-2:], mode="nearest")
            x = block(torch.cat([x, skip], dim=1), time)
        return self.head(x)


def noised(rows: int, length: int) -> dict[str, Any]:
    return {
        "image": torch.randn(rows, 3, 8, 8 + length),
        "times": torch.randint(1000, (rows,)),
        "noise": torch.randn(rows, 3, 8, 8 + length),
    }


def denoising_loss(output: Tensor, batch: dict[str, Tensor]) -> TokenLoss:
    """The squared error of each predicted pixel, by the number of pixels."""
    return TokenLoss((output - batch["noise"]).square().sum(), output.numel())
