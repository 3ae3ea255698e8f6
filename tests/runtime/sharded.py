"""What the tests of sharding share: models with uneven rows, a process that is alone in its group, gradients."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from graphcomp.dataparallel.rows import padded_rows
from graphcomp.dataparallel.spec import Shards


class Uneven(nn.Module):
    """Rows that no number of ranks divides: 5, 2 and 1; a tied weight, a frozen one, and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(3, 5), nn.Linear(5, 2)
        self.one = nn.Linear(2, 1, bias=False)
        self.tied = nn.Linear(3, 5, bias=False)
        self.tied.weight = self.up.weight
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x).relu() + self.tied(x)
        return self.one(self.down(hidden)) * self.scale + self.frozen.sum()


def uneven(seed: int = 0) -> Uneven:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Uneven()


def data_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))


@contextlib.contextmanager
def alone() -> Iterator[DeviceMesh]:
    """A mesh of this process only."""
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", store=dist.FileStore(str(Path(folder, "store")), 1), rank=0, world_size=1)
        try:
            yield data_mesh()
        finally:
            dist.destroy_process_group()


def gradient_of(parameter: Tensor, step: int) -> Tensor:
    """Any whole gradient, the same on all ranks."""
    drawn = torch.Generator().manual_seed(1000 * step + parameter.numel())
    return torch.randn(parameter.shape, generator=drawn, dtype=parameter.dtype)


def gradients(model: nn.Module, step: int, shards: Mapping[str, Shards], rank: int = 0) -> dict[str, Tensor]:
    """What a step hands over: whole gradients, and padded rows of those that are sharded."""
    whole = {name: gradient_of(p, step) for name, p in model.named_parameters() if p.requires_grad}
    return {n: padded_rows(shards[n], g, rank).clone() if n in shards else g for n, g in whole.items()}


def full(tensor: Tensor) -> Tensor:
    """The whole values, as a plain tensor."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()
