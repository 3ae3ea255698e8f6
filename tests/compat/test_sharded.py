"""Why a parameter needs a class of its own to become a DTensor in place, and that this class lacks nothing."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.optim.optimizer import _foreach_supported_types

from graphcomp.compat.sharded import (
    FIELDS,
    ShardedParameter,
    SlotlessDTensor,
    hindrance,
    local_rows,
    shard_in_place,
    sharded_like,
)
from tests.runtime.sharded import alone

pytestmark = pytest.mark.gloo

NOT_TAKEN = {
    "__module__",
    "__annotations__",
    "__doc__",
    "__slots__",
    "__new__",
    "__init__",
    "_op_dispatcher",
    "from_local",  # makes a new tensor
    "__tensor_flatten__",  # of torch.compile: the class that it would build is DTensor
    "__tensor_unflatten__",
    "__coerce_tangent_metadata__",
    "__coerce_same_metadata_as_tangent__",
    "_stable_hash_for_caching",
    "__slotnames__",  # put there by copyreg
}


def test_torch_itself_still_refuses() -> None:
    """Once this fails, shards can do without this shim."""
    parameter = nn.Parameter(torch.ones(2))
    with alone() as mesh, pytest.raises(RuntimeError, match="different slots"):
        torch.utils.swap_tensors(parameter, nn.Parameter(DTensor.from_local(torch.ones(2), mesh, [Shard(0)])))


def test_it_has_all_that_a_dtensor_has() -> None:
    assert set(vars(DTensor)) - NOT_TAKEN - set(FIELDS) <= set(vars(SlotlessDTensor))
    assert set(FIELDS) == set(DTensor.__slots__)


def test_operators_return_dtensors_of_the_same_memory() -> None:
    parameter, rows = nn.Parameter(torch.ones(4, 2)), torch.full((4, 2), 3.0)
    with alone() as mesh:
        shard_in_place(parameter, rows, mesh, None)
        assert type(parameter) is ShardedParameter
        assert isinstance(parameter, DTensor)
        assert local_rows(parameter) is rows
        with torch.no_grad():
            assert parameter.add_(1.0) is parameter
            torch._foreach_mul_([parameter], 2.0)
        assert (rows == 8.0).all()
        for found in (parameter.detach(), parameter.data, parameter + 1, 1 + parameter, torch.zeros_like(parameter)):
            assert type(found) is DTensor
        assert type(parameter.grad_fn) is type(None)
        (parameter * parameter.detach()).sum().backward()
        assert (local_rows(parameter.grad) == 8.0).all()
        assert "DTensor(local_tensor=" in repr(parameter)
        assert ShardedParameter in _foreach_supported_types


def test_a_dtensor_like_another_one_may_have_another_dtype() -> None:
    parameter = nn.Parameter(torch.ones(4, 2))
    with alone() as mesh:
        shard_in_place(parameter, torch.ones(4, 2), mesh, None)
        for dtype in (torch.float32, torch.float64):
            found = sharded_like(torch.ones(4, 2, dtype=dtype), parameter)
            assert (found.dtype, found._spec.tensor_meta.dtype) == (dtype, dtype)
            assert (found + found).dtype is dtype


def test_who_keeps_a_parameter_from_being_swapped() -> None:
    parameter = nn.Parameter(torch.ones(2))
    assert hindrance(parameter) is None
    square = parameter.square()
    assert "autograd graph" in str(hindrance(parameter))
    square.sum().backward()
    assert hindrance(parameter) is None  # its end is still there, but torch makes that raise
    assert hindrance(nn.Parameter(torch.ones(2), requires_grad=False)) is None
