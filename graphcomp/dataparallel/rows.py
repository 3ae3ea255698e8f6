"""One data rank's rows of a parameter in the form that step programs take, and back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from graphcomp.dataparallel.spec import Shards


def padded_rows(of: Shards, whole: torch.Tensor, rank: int) -> torch.Tensor:
    """The rows of `rank` out of the whole parameter, zeros where it has fewer than `of.chunk`."""
    begin = min(rank * of.chunk, of.rows)
    return pad(of, whole.narrow(0, begin, of.rows_of(rank)))


def pad(of: Shards, rows: torch.Tensor) -> torch.Tensor:
    """A rank's rows with zeros behind them up to `of.chunk`; the rows themselves if none is missing."""
    missing = of.chunk - rows.shape[0]
    return F.pad(rows, [0, 0] * (rows.dim() - 1) + [0, missing]) if missing else rows


def join_rows(of: Shards, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The whole from the padded rows of all data ranks, in their order."""
    return torch.cat(list(parts)).narrow(0, 0, of.rows)
