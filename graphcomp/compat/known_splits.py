"""Which numbers stand for the splits of exact exchanges while one program is traced. How often a tensor was written to
has no public name."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

_known: Any = None
"""While something is captured, by fake tensor: how often it was written to, and what stands for its contents."""


@contextlib.contextmanager
def knowing_splits() -> Iterator[None]:
    """Within, the same splits stand for the same numbers wherever they are read, so rows sent back are as many as came.

    Elsewhere each call makes its own symbols, which is what runs a node anew expects of it.
    """
    global _known
    before, _known = _known, WeakIdKeyDictionary()
    try:
        yield
    finally:
        _known = before


def known(splits: torch.Tensor) -> list[Any] | None:
    """What stands for splits, unless they were written to since."""
    version, numbers = (None, None) if _known is None else _known.get(splits, (None, None))
    return numbers if version == splits._version else None


def keep(splits: torch.Tensor, numbers: list[Any]) -> None:
    if _known is not None:
        _known[splits] = splits._version, numbers
