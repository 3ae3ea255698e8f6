"""Checks of arguments that several collectives share."""

from __future__ import annotations

from typing import Any, cast

import torch

from graphcomp.errors import CollectiveError


def dense(x: object, collective: str, least: int = 1) -> torch.Tensor:
    """The argument as a tensor that can be sent, of at least so many dimensions."""
    if not isinstance(x, torch.Tensor) or x.layout is not torch.strided:
        got = type(x).__name__ if not isinstance(x, torch.Tensor) else f"a tensor of layout {x.layout}"
        raise CollectiveError(
            "a collective takes a strided tensor", where=f"collectives.{collective}", expected="a tensor", got=got
        )
    if x.dim() < least:
        raise CollectiveError(
            "a collective that moves rows takes a tensor that has some",
            where=f"collectives.{collective}",
            expected=f"at least {least} dimension",
            got="a tensor of no dimension",
            do="x.reshape(1)",
        )
    return x


def dimension(dim: object, x: torch.Tensor, collective: str) -> int:
    """A dimension counted from the front."""
    if isinstance(dim, bool) or not isinstance(dim, int) or not -x.dim() <= dim < x.dim():
        raise CollectiveError(
            "there is no such dimension",
            where=f"collectives.{collective}",
            expected=f"a whole number from {-x.dim()} to {x.dim() - 1}",
            got=f"dim={dim!r} of a tensor of {x.dim()} dimensions",
        )
    return dim % x.dim()


def whole(name: str, value: Any, least: int, most: int | None, collective: str) -> int:
    """A whole number, or a size of the batch, within bounds, both included."""
    is_whole = isinstance(value, int | torch.SymInt) and not isinstance(value, bool)
    if not is_whole or value < least or (most is not None and value > most):
        bounds = f"from {least}" if most is None else f"from {least} to {most}"
        raise CollectiveError(
            f"'{name}' is a whole number",
            where=f"collectives.{collective}",
            expected=f"a whole number {bounds}",
            got=f"{name}={value!r}",
        )
    return cast(int, value)
