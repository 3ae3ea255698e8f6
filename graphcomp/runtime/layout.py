"""Where this process stands: its rank in the pipeline, its device, and the process groups it talks over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from graphcomp.errors import PlanError
from graphcomp.plan import Plan
from graphcomp.runtime.difference import difference


@dataclass(frozen=True)
class Layout:
    """rank: in the pipeline. ranks: the global rank of each pipeline rank. data_rank: of `data_ranks` pipelines.

    down, up: groups for activations and for gradients. closing: of the pipeline, for the closing exchange. data: the
    ranks that hold the same stage in every pipeline. data_mesh: the same as a mesh axis. side: gloo, all ranks of all
    pipelines, for host-side agreement. None where there is nobody to talk to.
    lines: for every pipeline, in order of data ranks, its members' places in `side`.
    """

    rank: int
    ranks: tuple[int, ...]
    device: torch.device
    down: dist.ProcessGroup | None = None
    up: dist.ProcessGroup | None = None
    closing: dist.ProcessGroup | None = None
    side: dist.ProcessGroup | None = None
    data: dist.ProcessGroup | None = None
    data_mesh: DeviceMesh | None = None
    data_rank: int = 0
    data_ranks: int = 1
    lines: tuple[tuple[int, ...], ...] = ()

    @property
    def stages(self) -> int:
        return len(self.ranks)


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
    for axis in ("tp", "cp"):
        if plan.axis(axis) > 1:
            raise PlanError(
                f"the mesh's axis '{axis}' is larger than 1, which is not supported yet",
                expected=f"{axis}=1",
                got=f"{axis}={plan.axis(axis)}",
                do="see docs/limits.md",
            )
    if not dist.is_initialized():
        raise PlanError(
            "the plan has a mesh, but this process is in no process group",
            expected=f"{plan.mesh.size()} processes, as the mesh has ranks",
            got="no default process group",
            do="start the processes with torchrun and call init_process_group",
        )
    if any(list(line) != sorted(line) for line in (*pipelines(plan.mesh), *zip(*pipelines(plan.mesh), strict=True))):
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
    if mesh.size() == 1:
        return Layout(0, (dist.get_rank(),), device)
    lines = pipelines(mesh)
    limit, me = timedelta(seconds=plan.deadline), dist.get_rank()
    data_rank = next(i for i, line in enumerate(lines) if me in line)
    rank = lines[data_rank].index(me)
    everyone = sorted(member for line in lines for member in line)
    side = dist.new_group(everyone, timeout=limit, backend="gloo")
    _require_one_plan(plan, side)
    down, up, closing = (_own_group(lines, limit) for _ in range(3))
    data = _own_group([list(members) for members in zip(*lines, strict=True)], limit)
    return Layout(
        rank=rank,
        ranks=tuple(lines[data_rank]),
        device=device,
        down=down,
        up=up,
        closing=closing,
        side=side,
        data=data,
        data_mesh=mesh["dp"] if len(lines) > 1 else None,
        data_rank=data_rank,
        data_ranks=len(lines),
        lines=tuple(tuple(map(everyone.index, line)) for line in lines),
    )


def _require_one_plan(plan: Plan, side: dist.ProcessGroup) -> None:
    """Compare what must be equal on all ranks, before it decides which groups they make."""
    lines = [] if plan.mesh is None else [f"mesh={plan.mesh.mesh_dim_names} {plan.mesh.mesh.tolist()}"]
    free = ("mesh", "quiet", "deadline")
    lines += [f"{one.name}={getattr(plan, one.name)!r}" for one in fields(plan) if one.name not in free]
    texts: list[str] = [""] * dist.get_world_size(side)
    dist.all_gather_object(texts, "\n".join(lines), group=side)
    other = next((rank for rank, text in enumerate(texts) if text != texts[0]), None)
    if other is not None:
        raise difference(texts, 0, other)


def pipelines(mesh: DeviceMesh) -> list[list[int]]:
    """The global ranks of every pipeline, in order of data ranks."""
    names = list(mesh.mesh_dim_names or ())
    grid = mesh.mesh
    for axis in ("pp", "dp"):  # the last two dimensions become dp, pp
        if axis not in names:
            grid, names = grid.unsqueeze(0), [axis, *names]
    rest = [i for i, name in enumerate(names) if name not in ("dp", "pp")]
    grid = grid.permute(*rest, names.index("dp"), names.index("pp"))
    return grid.reshape(-1, grid.shape[-1]).tolist()


def _own_group(parts: Sequence[Sequence[int]], limit: timedelta) -> dist.ProcessGroup | None:
    """This rank's one of these disjoint groups; None if it is alone in it. Every rank takes part in making each."""
    own: dist.ProcessGroup | None = None
    for part in parts:
        if len(part) > 1:
            group = dist.new_group(list(part), timeout=limit)
            own = group if dist.get_rank() in part else own
    return own
