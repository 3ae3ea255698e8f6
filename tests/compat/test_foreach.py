"""Adding lists of tensors in place."""

from __future__ import annotations

import torch

from graphcomp.compat.foreach import add_each


def test_each_total_keeps_its_memory_and_dtype() -> None:
    totals = [torch.zeros(2, 3), torch.ones(4)]
    addresses = [total.data_ptr() for total in totals]
    add_each(totals, [torch.ones(3, 2).t(), torch.full((4,), 0.5, dtype=torch.bfloat16)])
    assert [total.data_ptr() for total in totals] == addresses
    assert [total.dtype for total in totals] == [torch.float32, torch.float32]
    assert totals[0].sum() == 6 and totals[1].tolist() == [1.5] * 4


def test_nothing_to_add() -> None:
    add_each([], [])
