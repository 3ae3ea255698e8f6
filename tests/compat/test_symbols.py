"""Batch tensors of a trace: their sizes are symbols, and nothing else about them is."""

from __future__ import annotations

import torch

from graphcomp.compat.symbols import conditions, fake_batch_leaf, new_fake_mode


def test_a_part_of_another_tensor_begins_nowhere_in_particular() -> None:
    whole = torch.ones(2, 4, 5, requires_grad=True)
    mode = new_fake_mode()
    first, second = (fake_batch_leaf(mode, leaf, name) for leaf, name in zip(whole, ("x", "y"), strict=True))
    assert type(second.storage_offset()) is int and second.storage_offset() == first.storage_offset() == 0
    assert (second.dtype, second.device, second.requires_grad) == (whole.dtype, whole.device, False)
    sizes = {str(size.node.expr) for leaf in (first, second) for size in leaf.shape}
    assert len(sizes) == 4
    assert {str(symbol) for symbol in mode.shape_env.backed_var_to_val} == sizes  # type: ignore[union-attr]
    assert {str(s) for each in conditions(mode, sizes) for s in each.free_symbols} == sizes
