"""Sums along a dimension that tensor ranks have in parts, counted from the end. While a program is traced.

The rule by which `DTensor` gathers what `cumsum` and `logcumsumexp` run along takes a negative dimension for one that
is not in parts, so that each rank would begin at zero, and nobody hears of it. The rule has no public name.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from torch.distributed.tensor._ops import _math_ops

from graphcomp.compat.replaced import replaced


@contextlib.contextmanager
def scans_of_parts() -> Iterator[None]:
    """Within, operators that run along a dimension of a `DTensor` find it from either end."""
    rule = _math_ops.common_reduction_strategy

    def counted(given: Any, dims: Sequence[int], *args: Any, **options: Any) -> Any:
        return rule(given, [dim % given.ndim if dim < 0 else dim for dim in dims], *args, **options)

    with replaced((_math_ops, "common_reduction_strategy", counted)):
        yield
