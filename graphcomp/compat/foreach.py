"""Operations over lists of tensors, which have no public names."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def add_each(totals: Sequence[torch.Tensor], terms: Sequence[torch.Tensor]) -> None:
    """Add to each total its term, in place and in the total's dtype: one call, on CUDA one kernel for many."""
    if totals:
        torch._foreach_add_(list(totals), list(terms))
