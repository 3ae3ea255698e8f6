"""Where this process stands: its rank in the pipeline, its device, and the process groups it talks over."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from graphcomp.compat.blocks import joined
from graphcomp.errors import PlanError
from graphcomp.plan import Plan
from graphcomp.runtime.program.channel import Channel
from graphcomp.runtime.ranks.chain import Chain
from graphcomp.runtime.ranks.difference import difference
from graphcomp.runtime.ranks.grid import Grid
from graphcomp.runtime.ranks.meeting import connect
from graphcomp.schedule import named_stages


@dataclass(frozen=True)
class Layout:
    """rank: in the pipeline. ranks: the global rank of each pipeline rank; stage s is on rank s % len(ranks), one of
    `stages_per_rank` there. data_rank: of `data_ranks`, each with microbatches of its own. tensor_rank: among those
    that hold parts of the same stages (axis `tp`).

    down, up: groups for activations and for gradients. down_back, up_back: where a rank holds several stages, for those
    that go to a lower and to a higher rank. channels: to the neighbours on this machine, by their rank in the pipeline:
    one that stands for down and up, where there are those another for down_back and up_back, and a last one for the
    chain. chain: of the pipeline. closing: of the pipeline, for the closing exchange. data: the ranks that hold the
    same in every data rank; data_axis: what programs call it; data_mesh: the same as a mesh of one axis. tensor: the
    tensor ranks. side: gloo, all ranks of the job, for host-side agreement. grid: of all ranks, as places in `side`.
    None where there is nobody to talk to, or no way.
    """

    rank: int
    ranks: tuple[int, ...]
    device: torch.device
    down: dist.ProcessGroup | None = None
    up: dist.ProcessGroup | None = None
    down_back: dist.ProcessGroup | None = None
    up_back: dist.ProcessGroup | None = None
    channels: Mapping[int, Sequence[Channel]] = field(default_factory=dict)
    chain: Chain | None = None
    closing: dist.ProcessGroup | None = None
    side: dist.ProcessGroup | None = None
    data: dist.ProcessGroup | None = None
    data_axis: str = "dp"
    data_mesh: DeviceMesh | None = None
    data_rank: int = 0
    data_ranks: int = 1
    tensor: dist.ProcessGroup | None = None
    tensor_rank: int = 0
    grid: Grid | None = None
    stages_per_rank: int = 1

    @property
    def stages(self) -> int:
        return len(self.ranks) * self.stages_per_rank

    @property
    def places(self) -> tuple[int, ...]:
        """For each stage its rank in the pipeline."""
        return tuple(stage % len(self.ranks) for stage in range(self.stages))

    @property
    def own_stages(self) -> tuple[int, ...]:
        """The stages of this rank, ascending."""
        return self.stages_on(self.rank)

    def stages_on(self, rank: int) -> tuple[int, ...]:
        """The stages of a rank of the pipeline, ascending."""
        return tuple(range(rank, self.stages, len(self.ranks)))

    @property
    def own_text(self) -> str:
        """What messages call them."""
        return named_stages(self.own_stages)

    @property
    def place(self) -> int:
        """Of this rank in the grid: all ranks of the job are in the mesh, so it is the global rank."""
        return self.ranks[self.rank]

    @property
    def peers(self) -> Mapping[str, tuple[int, ...]]:
        """For each axis over which ranks work together while their pipelines run: the ranks along it, with this one.

        Virtual data ranks have no ranks of their own.
        """
        if self.grid is None:
            return {self.data_axis: ()} if self.data_ranks > 1 else {}
        along = {axis: self.grid.along(axis) for axis in self.grid.shared_axes}
        return {axis: next(one for one in groups if self.place in one) for axis, groups in along.items()}

    def add_up(self, vector: torch.Tensor) -> int:
        """Add a vector up over the pipeline, in place; equal bits on all ranks. Returns how many exchanges it took."""
        if self.chain is not None:
            self.chain.add(vector)
        elif self.closing is not None:
            dist.all_reduce(vector, group=self.closing)
        return int(self.closing is not None)

    @property
    def own_groups(self) -> Iterator[dist.ProcessGroup]:
        """The groups that were made for this layout, and go with it."""
        own = (self.side, self.closing, self.down, self.up, self.down_back, self.up_back, self.data, self.tensor)
        return (group for group in own if group is not None)

    @property
    def own_channels(self) -> Iterator[Channel]:
        """All of them."""
        return (channel for ends in self.channels.values() for channel in ends)

    def given_back(self) -> Layout:
        """The same place, without groups and channels, which are closed. What other ranks wait for must be through.

        Connections and threads of a group go with its last reference.
        """
        for channel in self.own_channels:
            with contextlib.suppress(OSError, RuntimeError):
                channel.close()
        for group in self.own_groups:
            with contextlib.suppress(ValueError):  # given up after a failure, or destroyed with all others
                dist.destroy_process_group(group)
        nobody = dict.fromkeys(("down", "up", "down_back", "up_back", "closing", "side", "data", "tensor"))
        return replace(self, channels={}, chain=None, **nobody)  # type: ignore[arg-type]


def check_layout(plan: Plan) -> None:
    """Raise PlanError for a plan that this process cannot take part in. Without any effect."""
    if plan.mesh is None:
        if plan.stage_count > 1:
            raise PlanError(
                f"a plan of {plan.stage_count} stages needs a mesh with an axis 'pp' of that size",
                got="mesh=None (this process alone)",
                do='init_device_mesh(..., mesh_dim_names=("pp",)) under torchrun; or try it with testing.run_virtual',
            )
        return
    if not dist.is_initialized():
        raise PlanError(
            "the plan has a mesh, but this process is in no process group",
            expected=f"{plan.mesh.size()} processes, as the mesh has ranks",
            got="no default process group",
            do="start the processes with torchrun and call init_process_group",
        )
    grid = Grid.of(plan.mesh)
    if any(list(ranks) != sorted(ranks) for axis in ("pp", grid.data_axis, "tp") for ranks in grid.along(axis)):
        raise PlanError(
            "the ranks along an axis of the mesh are not in ascending order",
            expected="a mesh as init_device_mesh makes it",
            got=plan.mesh.mesh.tolist(),
        )
    if plan.mesh.size() != dist.get_world_size():
        raise PlanError(
            "the mesh does not hold all processes of this job",
            expected=f"a mesh of {dist.get_world_size()} ranks",
            got=f"a mesh of {plan.mesh.size()} ranks",
            do="make the mesh of the world's size, or start as many processes as the mesh has ranks",
        )


def make_layout(plan: Plan, model: nn.Module) -> Layout:
    """The layout of this process. Creates process groups, so all ranks of the mesh must call it.

    Raises AgreementError, on all of them, if they were given different plans.
    """
    if plan.mesh is None:
        tensors = [*model.parameters(), *model.buffers()]
        found = next((t.device for t in tensors if t.device.type != "meta"), torch.device("cpu"))
        return Layout(0, (0,), found)
    mesh = plan.mesh
    device = torch.device(mesh.device_type)
    if device.type != "cpu":
        device = torch.device(device.type, torch.get_device_module(device).current_device())
    each = plan.stages_on_each
    if mesh.size() == 1:
        return Layout(0, (dist.get_rank(),), device, stages_per_rank=each)
    limit, grid = timedelta(seconds=plan.deadline), Grid.of(mesh)
    data_rank, tensor_rank, rank = grid.position(dist.get_rank())
    side = dist.new_group(timeout=limit, backend="gloo")
    _require_one_plan(plan, side)
    down, up, closing = (_own_group(grid.pipelines, limit) for _ in range(3))
    down_back, up_back = (_own_group(grid.pipelines, limit) if each > 1 else None for _ in range(2))
    ranks = grid.ranks[data_rank][tensor_rank]
    channels = channels_of(rank, ranks, each, plan.deadline, side) if device.type == "cpu" else {}
    return Layout(
        rank=rank,
        ranks=ranks,
        device=device,
        down=down,
        up=up,
        down_back=down_back,
        up_back=up_back,
        channels=channels,
        chain=_chain(rank, ranks, channels, side) if device.type == "cpu" else None,
        closing=closing,
        side=side,
        data=_own_group(grid.along(grid.data_axis), limit),
        data_axis=grid.data_axis,
        data_mesh=_data_mesh(mesh, grid),
        data_rank=data_rank,
        data_ranks=len(grid.ranks),
        tensor=_own_group(grid.along("tp"), limit),
        tensor_rank=tensor_rank,
        grid=grid,
        stages_per_rank=each,
    )


def _data_mesh(mesh: DeviceMesh, grid: Grid) -> DeviceMesh | None:
    """The data ranks as a mesh of one axis. It is the user's, as sharded parameters outlive the layout."""
    axes = tuple(name for name, _ in grid.data_axes)
    return None if not axes else mesh[axes[0]] if len(axes) == 1 else joined(mesh, axes, grid.data_axis)


def _require_one_plan(plan: Plan, side: dist.ProcessGroup) -> None:
    """Compare what must be equal on all ranks, before it decides which groups they make."""
    lines = [] if plan.mesh is None else [f"mesh={plan.mesh.mesh_dim_names} {plan.mesh.mesh.tolist()}"]
    free = ("mesh", "quiet", "deadline")
    lines += [f"{one.name}={getattr(plan, one.name)!r}" for one in fields(plan) if one.name not in free]
    texts: list[str] = _exchange(side, "\n".join(lines))
    other = next((rank for rank, text in enumerate(texts) if text != texts[0]), None)
    if other is not None:
        raise difference(texts, 0, other)


def channels_of(
    rank: int, ranks: Sequence[int], each: int, deadline: float, side: dist.ProcessGroup
) -> Mapping[int, Sequence[Channel]]:
    """To the ranks before and after this one in the pipeline, which is a ring where each holds several stages."""

    beside = {(rank + by) % len(ranks) for by in (-1, 1)} - {rank}
    places = {ranks[other]: other for other in beside}
    found = connect(ranks[rank], sorted(places), min(each, 2) + 1, partial(_exchange, side)) if places else {}
    awake = _AWAKE if dist.get_world_size(side) <= _cores() else 0.0  # else another rank needs the core
    return {places[peer]: [Channel(one, peer, deadline, awake) for one in ends] for peer, ends in found.items()}


_AWAKE = 50e-6
"""Seconds. It is 4 % of a step of stages that take 0.4 ms; more seconds gain no more."""


def _cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _chain(
    rank: int, ranks: Sequence[int], channels: Mapping[int, Sequence[Channel]], side: dist.ProcessGroup
) -> Chain | None:
    """None unless all ranks of the pipeline have channels to those beside them."""
    beside = {rank - 1, rank + 1} & set(range(len(ranks)))
    connected = _exchange(side, bool(beside) and beside <= channels.keys())
    if not all(connected[other] for other in ranks):
        return None
    before, after = (channels[other][-1] if other in beside else None for other in (rank - 1, rank + 1))
    return Chain(rank, before, after, len(ranks))


def _exchange(side: dist.ProcessGroup, given: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size(side)
    dist.all_gather_object(found, given, group=side)
    return found


def _own_group(parts: Sequence[Sequence[int]], limit: timedelta) -> dist.ProcessGroup | None:
    """This rank's one of these disjoint groups; None if it is alone in it. Every rank takes part in making each."""
    own: dist.ProcessGroup | None = None
    for part in parts:
        if len(part) > 1:
            group = dist.new_group(list(part), timeout=limit)
            own = group if dist.get_rank() in part else own
    return own
