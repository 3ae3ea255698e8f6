"""Rows in runs of run-time length, in tensors whose shapes do not depend on the lengths.

Two forms of the same n runs of rows: *one behind the other* (run 0, run 1, ..., then anything), and in *blocks* (n of
`capacity` rows each; block i begins with the rows of run i, zeros behind). `pack` and `unpack` turn one into the other
and are each other's adjoint. Both only look rows up, on the device; lengths are never read on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch

from graphcomp.collectives.arguments import whole
from graphcomp.collectives.linear import linear
from graphcomp.errors import CollectiveError

Numbers: TypeAlias = torch.Tensor | Sequence[int]


def pack(x: torch.Tensor, runs: torch.Tensor, capacity: int) -> torch.Tensor:
    """Runs of rows, one behind the other, as blocks; what does not fit into a block, or is not there, is left out."""
    rows = x.shape[0]
    return linear(x, lambda x: _pack(x, runs, capacity), lambda g: unpack(g, runs, capacity, rows))


def unpack(blocks: torch.Tensor, runs: torch.Tensor, capacity: int, rows: int) -> torch.Tensor:
    """Blocks as runs of rows one behind the other, `rows` in all; zeros for rows that no block holds."""
    return linear(blocks, lambda b: _unpack(b, runs, capacity, rows), lambda g: pack(g, runs, capacity))


def _pack(x: torch.Tensor, runs: torch.Tensor, capacity: int) -> torch.Tensor:
    ends = runs.cumsum(0)
    place = torch.arange(capacity, device=x.device)
    row = ((ends - runs).unsqueeze(1) + place).flatten()
    here = (place < runs.unsqueeze(1)).flatten() & (row < x.shape[0])
    return _look_up(x, row, here)


def _unpack(blocks: torch.Tensor, runs: torch.Tensor, capacity: int, rows: int) -> torch.Tensor:
    ends = runs.cumsum(0)
    row = torch.arange(rows, device=blocks.device)
    run = torch.searchsorted(ends, row, right=True)
    block = run.clamp(max=runs.shape[0] - 1)
    place = row - (ends - runs)[block]
    here = (run < runs.shape[0]) & (place < capacity)
    return _look_up(blocks, block * capacity + place, here)


def _look_up(x: torch.Tensor, row: torch.Tensor, here: torch.Tensor) -> torch.Tensor:
    """The rows of these numbers, zeros where a row is not `here`."""
    if x.shape[0] == 0:
        return x.new_zeros(row.shape[0], *x.shape[1:])
    found = x.index_select(0, torch.where(here, row, 0))
    return found.masked_fill(~here.view(-1, *[1] * (x.dim() - 1)), 0)


def row_counts(name: str, given: Numbers, size: int, device: torch.device, collective: str) -> torch.Tensor:
    """One number a rank as an int64 tensor on `device`."""
    return counts_of(name, given, size, device, collective).detach().to(device, torch.int64)


def counts_of(name: str, given: Numbers, size: int, device: torch.device, collective: str) -> torch.Tensor:
    """One number a rank as a tensor: the given one itself, if it is one, so that what is known of it stays known."""
    if not isinstance(given, torch.Tensor):
        _require_length(name, given, size, collective)
        if all(isinstance(number, int) for number in given):
            return torch.tensor(list(given), dtype=torch.int64, device=device)
        return torch.stack([torch.full((), number, dtype=torch.int64, device=device) for number in given])
    is_whole = not (given.is_floating_point() or given.is_complex() or given.dtype is torch.bool)
    if given.dim() != 1 or given.shape[0] != size or not is_whole:
        raise CollectiveError(
            f"'{name}' holds one whole number for each rank of the group",
            where=f"collectives.{collective}",
            expected=f"an integer tensor of shape ({size},), or a list",
            got=f"{given.dtype} of shape {tuple(given.shape)}",
        )
    return given


def host_numbers(name: str, given: Numbers, size: int, most: int | None, collective: str) -> list[int] | None:
    """A list of one number a rank, checked; None for a tensor."""
    if isinstance(given, torch.Tensor):
        return None
    _require_length(name, given, size, collective)
    plain = (number for number in given if not isinstance(number, torch.SymInt))  # sizes are what they are
    for number in plain:
        whole(name, number, 0, most, collective)
    return list(given)


def _require_length(name: str, given: object, size: int, collective: str) -> None:
    if not isinstance(given, Sequence) or isinstance(given, str) or len(given) != size:
        raise CollectiveError(
            f"'{name}' holds one number for each rank of the group",
            where=f"collectives.{collective}",
            expected=f"a list of {size} whole numbers, or an integer tensor of shape ({size},)",
            got=repr(given),
        )
