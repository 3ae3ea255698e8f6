"""Sizes that Inductor cannot compare: a choice between two codes that are both right must not become a condition.

The C++ backend asks whether a sum has more than 4096 terms, to add them up in another order. A switch, which has no
public name, lets it take the usual code wherever it only may ask. Of two sizes it needs the smaller one, though, and
raises: so it is given that as an expression, as it takes for sizes that are known at run time only.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import sympy
from torch.utils._sympy.functions import Max, Min

from graphcomp.compat.replaced import replaced


@contextlib.contextmanager
def ask_nothing() -> Iterator[None]:
    """Within, Inductor assumes nothing of sizes where it may do without."""
    from torch._inductor.sizevars import SizeVarAllocator
    from torch.fx.experimental import _config as symbol_config

    smaller, larger = (SizeVarAllocator, "evaluate_min", _smaller), (SizeVarAllocator, "evaluate_max", _larger)
    with symbol_config.patch(backed_size_oblivious=True), replaced(smaller, larger):  # type: ignore[attr-defined]
        yield


def _smaller(sizes: Any, left: Any, right: Any) -> Any:
    left, right = _plain(sizes, left), _plain(sizes, right)
    if _known(sizes, left, right):
        return left
    return right if _known(sizes, right, left) else Min(left, right)


def _larger(sizes: Any, left: Any, right: Any) -> Any:
    left, right = _plain(sizes, left), _plain(sizes, right)
    if _known(sizes, left, right):
        return right
    return left if _known(sizes, right, left) else Max(left, right)


def _plain(sizes: Any, size: Any) -> sympy.Expr:
    return sizes.remove_precomputed_replacements(sympy.sympify(size))


def _known(sizes: Any, left: sympy.Expr, right: sympy.Expr) -> bool:
    """Whether the left one is never larger. No size is larger than the open end of a slice."""
    return bool(right.is_Integer and right >= sys.maxsize) or bool(sizes.statically_known_leq(left, right))
