"""The closed table of reductions."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

import torch
import torch.distributed as dist

from graphcomp.errors import CollectiveError

Reduction = Literal["sum", "avg", "max", "min", "product"]

SPELLINGS: Mapping[object, Reduction] = MappingProxyType({
    "sum": "sum", dist.ReduceOp.SUM: "sum",
    "avg": "avg", "mean": "avg", dist.ReduceOp.AVG: "avg",
    "max": "max", dist.ReduceOp.MAX: "max",
    "min": "min", dist.ReduceOp.MIN: "min",
    "product": "product", "prod": "product", dist.ReduceOp.PRODUCT: "product",
})  # fmt: skip
"""Every spelling that is accepted, and the one reduction that it means."""


def reduction(op: object, x: torch.Tensor, collective: str) -> Reduction:
    """The reduction that a spelling means. Raises CollectiveError for any other, and for an average of integers."""
    try:
        found = SPELLINGS.get(op)
    except TypeError:  # not hashable
        found = None
    if found is None:
        raise CollectiveError(
            "there is no such reduction",
            where=f"collectives.{collective}",
            expected=", ".join(repr(name) for name in SPELLINGS if isinstance(name, str)),
            got=repr(op),
        )
    if found == "avg" and not (x.is_floating_point() or x.is_complex()):
        raise CollectiveError(
            "an average of integers is no integer",
            where=f"collectives.{collective}",
            expected="a floating-point tensor, or op='sum'",
            got=f"op={op!r} of {x.dtype}",
        )
    return found
