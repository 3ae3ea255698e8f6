"""Operator classes and schemas are where the shim expects them."""

import torch

from graphcomp.compat.operators import HigherOrderOperator, OpOverload, argument_names, is_mutable


def test_targets_of_graphs_are_overloads() -> None:
    assert isinstance(torch.ops.aten.mm.default, OpOverload)
    assert not isinstance(torch.ops.aten.mm, OpOverload)
    assert isinstance(torch.ops.higher_order.cond, HigherOrderOperator)


def test_schema() -> None:
    assert argument_names(torch.ops.aten.mm.default) == ["self", "mat2"]
    assert is_mutable(torch.ops.aten.add_.Tensor)
    assert not is_mutable(torch.ops.aten.add.Tensor)
