"""Where a program runs: the one part of a trainer that asks. All else is the same text at every layout."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import graphcomp as gc

Item = TypeVar("Item")


@dataclass(frozen=True)
class Place:
    """data_rank, data_ranks: whose microbatches are this rank's. first: whether this rank shows what all know."""

    plan: gc.Plan
    device: torch.device
    data_rank: int = 0
    data_ranks: int = 1
    first: bool = True

    def share(self, items: list[Item]) -> list[Item]:
        """This data rank's part of a list that is the same on all ranks; the parts of all, in order, are the list."""
        count, ranks = len(items), self.data_ranks
        return items[self.data_rank * count // ranks : (self.data_rank + 1) * count // ranks]

    def log(self, file: Path, **numbers: object) -> None:
        """Shown, and added to the file as a line of JSON, by one rank."""
        if self.first:
            shown = {name: f"{value:.4f}" if isinstance(value, float) else value for name, value in numbers.items()}
            print("  ".join(f"{name} {value}" for name, value in shown.items()), flush=True)
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("a") as lines:
                lines.write(json.dumps(numbers) + "\n")


@contextmanager
def place(data_ranks: int, **options: Any) -> Iterator[Place]:
    """This process alone; or, under torchrun, pipelines of as many stages as there are processes for each data rank.

    On GPUs if there is one for each process, else on the CPU. options: of the plan.
    """
    if "RANK" not in os.environ:
        yield Place(gc.Plan(**options), torch.device("cpu"))
        return
    device = torch.device("cpu")
    if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl")
    shape = (dist.get_world_size() // data_ranks, data_ranks)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("pp", "dp"))
    yield Place(gc.Plan(mesh=mesh, **options), device, mesh.get_local_rank("dp"), data_ranks, dist.get_rank() == 0)
    dist.destroy_process_group()
