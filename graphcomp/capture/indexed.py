"""Shapes that operators rely on, by index most of all, and that torch's fakes do not look at."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

from graphcomp.compat.believed import rely_on
from graphcomp.compat.run_time_sizes import is_run_time


def indexed_shape(shape: Sequence[Any], indices: Sequence[torch.Tensor | None]) -> list[Any]:
    """The shape of `x[indices]` for an x of this shape. Indices are tensors of places, or None for all of a dimension.

    What the indices are broadcast to stands where they do, or first where something stands between them.
    """
    places = [place for place, index in enumerate(indices) if index is not None]
    found: list[Any] = []
    for index in indices:
        if index is not None:
            found = _broadcast(found, index.shape)
    runs = [taken for taken, _ in groupby(indices, lambda index: index is not None)]
    first = places[0] if places and runs.count(True) == 1 else 0
    kept = [size for place, size in enumerate(shape) if place not in places]
    return [*kept[:first], *found, *kept[first:]]


def check_broadcasts(shape: Sequence[Any], to: Sequence[Any]) -> None:
    """A tensor of one shape is broadcast to another: each of its sizes is equal, or 1."""
    expected = [*[1] * (len(shape) - len(to)), *to]
    for size, wanted in zip(reversed(shape), reversed(expected), strict=False):
        if not _is_one(size):
            rely_on(size == wanted, lambda: f"shape mismatch: {list(shape)} cannot be broadcast to {list(to)}")


def check_slice(x: torch.Tensor, values: torch.Tensor, *where: Any, **named: Any) -> Any:
    """`slice_scatter` takes values of exactly the shape of the slice. Stays as it is."""
    part = torch.ops.aten.slice.Tensor(x, *where, **named)
    for size, wanted in zip(values.shape, part.shape, strict=False):
        rely_on(size == wanted, lambda: f"a slice of shape {list(part.shape)} is given {list(values.shape)}")
    return NotImplemented


def check_squeeze(x: torch.Tensor, dim: Any = None) -> Any:
    """A dimension whose size is known at run time only stays, so it may not be 1. Stays as it is."""
    dims = range(x.dim()) if dim is None else dim if isinstance(dim, Sequence) else [dim]
    for size in (x.shape[place] for place in dims if x.dim()):
        if is_run_time(size):
            rely_on(size != 1, lambda: "squeeze would drop a dimension of one row")
    return NotImplemented


def check_spread(x: torch.Tensor, dim: Any = None, *, correction: Any = None, **_: Any) -> Any:
    """The backward of `std` and `var` divides by how many they are of, less one: eager code goes on with nan, a program
    has a number of Python there. Stays as it is."""
    dims = dim if isinstance(dim, Sequence) and dim else range(x.dim()) if dim is None or dim == [] else [dim]
    count = math.prod(x.shape[place] for place in dims)
    if torch.is_grad_enabled() and is_run_time(count):
        rely_on(count != (1 if correction is None else correction), lambda: "std or var of too few rows")
    return NotImplemented


def _broadcast(one: Sequence[Any], other: Sequence[Any]) -> list[Any]:
    longer, shorter = sorted((list(one), list(other)), key=len, reverse=True)
    found = longer[: len(longer) - len(shorter)]
    for left, right in zip(longer[len(found) :], shorter, strict=True):
        if not _is_one(left) and not _is_one(right):
            rely_on(left == right, lambda: f"indices of shapes {list(one)} and {list(other)} do not fit together")
        found.append(right if _is_one(left) else left)
    return found


def _is_one(size: Any) -> bool:
    """Of a size known at run time only, whether it is 1 for all microbatches."""
    return statically_known_true(size == 1) if is_run_time(size) else bool(size == 1)
