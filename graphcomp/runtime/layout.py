"""Where this process stands: its rank in the pipeline, its device, and the process groups it talks over."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from graphcomp.errors import PlanError
from graphcomp.plan import Plan


@dataclass(frozen=True)
class Layout:
    """rank: in the pipeline. ranks: the global rank of each pipeline rank.

    down, up: groups for activations and for gradients. closing: for the closing exchange. side: gloo, for
    host-side agreement. All None for one stage.
    """

    rank: int
    ranks: tuple[int, ...]
    device: torch.device
    down: dist.ProcessGroup | None = None
    up: dist.ProcessGroup | None = None
    closing: dist.ProcessGroup | None = None
    side: dist.ProcessGroup | None = None

    @property
    def stages(self) -> int:
        return len(self.ranks)


def check_layout(plan: Plan) -> None:
    """Raise PlanError for a plan that this process cannot take part in. Without any effect."""
    if plan.parameters == "shard":
        raise PlanError("parameters='shard' is not supported yet", do="use parameters='replicate'; see docs/limits.md")
    if plan.check is not None:
        raise PlanError(f"check={plan.check!r} is not supported yet", do="leave it out; see docs/limits.md")
    if plan.mesh is None:
        if plan.stage_count > 1:
            raise PlanError(
                f"a plan of {plan.stage_count} stages needs a mesh with an axis 'pp' of that size",
                got="mesh=None (this process alone)",
                do='init_device_mesh(..., mesh_dim_names=("pp",)) under torchrun; or try it with testing.run_virtual',
            )
        return
    for axis in ("dp", "tp", "cp"):
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
    if plan.mesh.size() != dist.get_world_size():
        raise PlanError(
            "the mesh does not hold all processes of this job",
            expected=f"a mesh of {dist.get_world_size()} ranks",
            got=f"a mesh of {plan.mesh.size()} ranks",
            do="make the mesh of the world's size, or start as many processes as the mesh has ranks",
        )


def make_layout(plan: Plan, model: nn.Module) -> Layout:
    """The layout of this process. Creates process groups, so all ranks of the mesh must call it."""
    if plan.mesh is None:
        tensors = [*model.parameters(), *model.buffers()]
        found = next((t.device for t in tensors if t.device.type != "meta"), torch.device("cpu"))
        return Layout(0, (0,), found)
    mesh = plan.mesh
    device = torch.device(mesh.device_type)
    if device.type != "cpu":
        device = torch.device(device.type, torch.get_device_module(device).current_device())
    names = mesh.mesh_dim_names or ()
    if "pp" not in names:
        return Layout(0, (dist.get_rank(),), device)
    lines = mesh.mesh.movedim(names.index("pp"), -1).reshape(-1, plan.axis("pp")).tolist()
    limit = timedelta(seconds=plan.deadline)
    own: Layout | None = None
    for line in lines:  # every rank takes part in making every group
        down, up, closing = (dist.new_group(line, timeout=limit) for _ in range(3))
        side = dist.new_group(line, timeout=limit, backend="gloo")
        if dist.get_rank() in line:
            own = Layout(line.index(dist.get_rank()), tuple(line), device, down, up, closing, side)
    if own is None:
        raise PlanError("this process is not in the mesh", got=f"rank {dist.get_rank()}")
    return own
