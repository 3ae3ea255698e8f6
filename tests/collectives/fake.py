"""A process group of ranks that do not exist: enough to trace what one of them would do."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextlib.contextmanager
def fake_mesh(rank: int = 0, **axes: int) -> Iterator[DeviceMesh]:
    """Within, this process is one rank of a mesh; what collectives compute is meaningless."""
    size = 1
    for length in axes.values():
        size *= length
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    finally:
        dist.destroy_process_group()
