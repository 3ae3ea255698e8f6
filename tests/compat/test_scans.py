"""What runs along a dimension in parts gathers it first, from whichever end the dimension is counted."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._ops import _math_ops

from graphcomp.compat.scans import scans_of_parts
from graphcomp.compat.tensor_parallel import forget_meshes
from tests.collectives.fake import fake_mesh


@pytest.mark.parametrize("function", [torch.cumsum, torch.logcumsumexp])
def test_a_dimension_counted_from_the_end(function: Callable[[Tensor, int], Tensor]) -> None:
    with fake_mesh(0, tp=2) as mesh:
        for shim, dim, placement in ((False, 1, Replicate()), (False, -1, Shard(1)), (True, -1, Replicate())):
            forget_meshes()
            whole = DTensor.from_local(torch.ones(3, 4), mesh["tp"], [Shard(1)], run_check=False)
            with scans_of_parts() if shim else contextlib.nullcontext():
                assert function(whole, dim).placements == (placement,)
                assert function(whole, 0).placements == (Shard(1),)
    forget_meshes()


def test_torch_is_as_before() -> None:
    before = dict(vars(_math_ops))
    with scans_of_parts():
        assert vars(_math_ops) != before
    assert vars(_math_ops) == before
