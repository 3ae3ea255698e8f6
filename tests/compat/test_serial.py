"""Fake tensors, symbolic numbers and operators, taken apart and put together again."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from graphcomp.compat.estimates import hint
from graphcomp.compat.reads import EXCHANGE_SPLITS
from graphcomp.compat.run_time_sizes import is_run_time
from graphcomp.compat.serial import reduced
from graphcomp.compat.symbols import conditions, expression, fake_batch_leaf, new_fake_mode
from graphcomp.ir.pickling import from_bytes, to_bytes


def again(value: Any) -> Any:
    return from_bytes(to_bytes(value))


@pytest.mark.parametrize(
    "operator",
    [torch.ops.aten.add.Tensor, torch.ops.aten.mm.default, torch.ops._c10d_functional.all_reduce.default],
)
def test_operators_are_the_same_objects(operator: Any) -> None:
    assert again(operator) is operator


def test_fake_tensors_keep_their_form_and_share_their_mode() -> None:
    mode = new_fake_mode()
    x = fake_batch_leaf(mode, torch.randn(6, 4), "x")
    with mode:
        values = [x, x.t(), x[2:], x.double().sum(), torch.nn.Parameter(torch.empty(3, 5))]
    found = again(values)
    assert len({id(value.fake_mode) for value in found}) == 1 and found[0].fake_mode is not mode
    for one, two in zip(values, found, strict=True):
        assert (one.dtype, one.fake_device, one.requires_grad) == (two.dtype, two.fake_device, two.requires_grad)
        for first, second in ((one.shape, two.shape), (one.stride(), two.stride())):
            assert [expression(mode, n) for n in first] == [expression(found[0].fake_mode, n) for n in second]
        assert str(one.storage_offset()) == str(two.storage_offset())
    assert isinstance(found[-1], torch.nn.Parameter)


def test_symbols_keep_their_ranges_and_hints() -> None:
    mode = new_fake_mode()
    x = fake_batch_leaf(mode, torch.randn(6, 4), "x")
    rows, doubled = again((x.shape[0], x.shape[0] * 2))
    assert rows.node.shape_env is doubled.node.shape_env
    assert (rows.node.hint, doubled.node.hint) == (6, 12)
    names = {str(rows.node.expr)}
    fresh = type("Mode", (), {"shape_env": rows.node.shape_env})
    assert conditions(fresh, names) == conditions(mode, names)  # type: ignore[arg-type]
    environment: Any = rows.node.shape_env
    assert set(environment.var_to_range) <= set(environment.var_to_range_sloc)  # or nothing can be compiled in it


def test_sizes_known_at_run_time_stay_apart_from_later_ones() -> None:
    mode = new_fake_mode()
    splits = mode.from_tensor(torch.tensor([2, 4]), static_shapes=True)
    with mode:
        total = EXCHANGE_SPLITS(splits, splits.flip(0), 6)[0]
    found, other = again((total, splits))
    assert is_run_time(found) and hint(found) == hint(total) == 6
    with other.fake_mode:
        later = EXCHANGE_SPLITS(other, other, 6)[0]
    assert str(later) != str(found)


def test_all_else_is_left_alone() -> None:
    assert reduced(torch.zeros(2)) is None and reduced(3) is None and reduced("text") is None
