"""All of several tensors become zero in place, whatever their form, and nothing beside them does."""

from __future__ import annotations

import torch

from graphcomp.compat.zeros import zero_all


def test_any_form() -> None:
    around = torch.full((4, 4), torch.nan)
    tensors = [
        around[1:3, 1:3],
        torch.ones(2, 3, dtype=torch.bfloat16).t(),
        torch.ones((), dtype=torch.float64),
        torch.ones(2, 0),
        torch.tensor([3], dtype=torch.int64),
    ]
    zero_all(tensors)
    assert all(torch.equal(tensor, torch.zeros_like(tensor)) for tensor in tensors)
    assert around.isnan().sum() == 12


def test_none() -> None:
    zero_all([])
