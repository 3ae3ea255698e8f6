"""Linear functions of one tensor whose adjoints are stated beside them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch

Map = Callable[[torch.Tensor], torch.Tensor]


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, run: Map, adjoint: Map) -> torch.Tensor:
        ctx.adjoint = adjoint
        return run(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.adjoint(gradient), None, None


def linear(x: torch.Tensor, run: Map, adjoint: Map) -> torch.Tensor:
    """`run(x)`, differentiated by `adjoint`. An adjoint made of such functions can be differentiated again."""
    return cast(torch.Tensor, _Linear.apply(x, run, adjoint))
