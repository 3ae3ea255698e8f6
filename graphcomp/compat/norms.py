"""Norms of many tensors in one call, which has no public name: the public one puts them together into one norm."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def largest_of_each(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The largest magnitude in each tensor, 0-dim; nan where an element is. No tensor may be empty."""
    return list(torch._foreach_norm(list(tensors), float("inf"))) if tensors else []
