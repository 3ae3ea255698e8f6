"""The shim for `loss_parallel`: whether it is on, and why capture has to know that for each operator."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import loss_parallel

from graphcomp.compat.tensor_parallel import (
    forget_meshes,
    is_part,
    local_part,
    loss_parallel_is_on,
    part_like,
    whole_like,
)
from tests.collectives.fake import fake_mesh


def test_whether_it_is_on() -> None:
    assert not loss_parallel_is_on()
    with loss_parallel():
        assert loss_parallel_is_on()
    assert not loss_parallel_is_on()


def test_a_backward_outside_of_it_fails() -> None:
    """Or else nobody would have to follow where an operator was recorded."""
    with fake_mesh(tp=2) as mesh:
        local = torch.ones(3, 2, requires_grad=True)
        logits = DTensor.from_local(local, mesh["tp"], [Shard(1)], run_check=False)
        with loss_parallel():
            loss = F.cross_entropy(logits, torch.zeros(3, dtype=torch.int64))
        with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
            loss.to_local().backward()


def test_meshes_that_are_gone() -> None:
    """An equal mesh is taken for the present one, with its process groups."""

    def mesh_of_a_sum() -> bool:
        with fake_mesh(tp=2) as mesh:
            whole = DTensor.from_local(torch.ones(7, 2), mesh["tp"], [Shard(1)], run_check=False)
            return whole.sin().device_mesh is whole.device_mesh

    forget_meshes()
    assert mesh_of_a_sum() and not mesh_of_a_sum()
    forget_meshes()
    assert mesh_of_a_sum()
    forget_meshes()


def test_parts() -> None:
    with fake_mesh(rank=1, dp=2, tp=2) as mesh:
        whole = DTensor.from_local(torch.ones(3, 2), mesh["tp"], [Shard(1)], run_check=False)
        over_data = DTensor.from_local(torch.ones(3, 2), mesh["dp"], [Shard(1)], run_check=False)
        plain = torch.ones(2)
        assert [is_part(each) for each in (whole, over_data, plain)] == [True, False, False]
        assert local_part(whole).shape == (3, 2) and local_part(plain) is plain
        again = whole_like(torch.zeros(3, 2), whole)
        assert (again.shape, again.placements, again.stride()) == (whole.shape, whole.placements, whole.stride())
        copied = DTensor.from_local(torch.arange(4.0), mesh["tp"], [Replicate()], run_check=False)
        split = DTensor.from_local(torch.ones(2), mesh["tp"], [Shard(0)], run_check=False)
        assert part_like(copied, split).tolist() == [2.0, 3.0] and part_like(plain, split) is plain
