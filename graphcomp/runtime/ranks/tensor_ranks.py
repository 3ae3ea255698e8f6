"""Tensor ranks (axis `tp`): which models they can train together, and what they must have in common."""

from __future__ import annotations

from math import prod

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from graphcomp.compat.blocks import placed_as, split_rows, splits_alike
from graphcomp.compat.tensor_parallel import AXIS, over_tensor_ranks, parts
from graphcomp.errors import PlanError
from graphcomp.plan import DATA_AXES, JOINED, Plan
from graphcomp.runtime.program.fingerprint import checksum


def check_parts(plan: Plan, model: nn.Module) -> None:
    """Raise PlanError for a DTensor in the model's state that a step under this plan cannot use. Without any effect."""
    mesh, ranks = plan.mesh, plan.axis(AXIS)
    axes = [axis for axis in DATA_AXES if plan.axis(axis) > 1] if plan.parameters == "shard" else []
    data, data_ranks = JOINED if len(axes) > 1 else "".join(axes), prod(map(plan.axis, axes))
    for name, tensor in parts(model).items():
        form, part = f"{tensor.placements} over {tensor.device_mesh}", over_tensor_ranks(tensor)
        if part is not None and (mesh is None or ranks == 1 or part.mesh != mesh[AXIS]):
            raise PlanError(
                f"'{name}' is laid out over the axis '{AXIS}' of a mesh that is not the plan's",
                expected=f"Plan(mesh=mesh) and parallelize_module(model, mesh['{AXIS}'], ...) with one mesh",
                got=form,
            )
        names = (data,) if part is None else (data, AXIS)
        sharded = (tensor.device_mesh.mesh_dim_names, tuple(tensor.placements)) == (names, split_rows(part))
        if ranks > 1 and placed_as(tensor) != part and not sharded:
            raise PlanError(
                f"'{name}' is laid out over another mesh than the plan's axis '{AXIS}'",
                expected=f"DTensors over mesh['{AXIS}'] alone, or plain tensors",
                got=form,
                do="leave the other axes to the plan",
            )
        if part is None:
            continue
        if type(part.placements[0]) not in (Shard, Replicate):
            raise PlanError(
                f"'{name}' is laid out over the tensor ranks in a way that a step cannot use",
                expected="Shard or Replicate",
                got=form,
            )
        parted = isinstance(tensor, nn.Parameter) and part.placements[0] == Shard(0)
        if data and parted and not splits_alike(tensor.shape[0], ranks, data_ranks):
            raise PlanError(
                f"the rows of '{name}' cannot be split over the tensor ranks and each part over the data ranks",
                expected=f"a multiple of {ranks} rows: as many on each tensor rank",
                got=f"{tensor.shape[0]} rows, {AXIS}={ranks}, {data}={data_ranks}",
                do="add rows to it (a vocabulary may be larger than what is used), lay it out by columns, or use "
                "parameters='replicate'",
            )


def values_text(model: nn.Module) -> str:
    """Checksums of the parameters that every tensor rank holds whole, one a line."""
    plain = {name: p for name, p in model.named_parameters() if not isinstance(p, DTensor) and not p.is_meta}
    with torch.no_grad():
        return "\n".join(
            f"parameter '{name}', a plain tensor and so the same on all tensor ranks: "
            f"checksum {int(checksum(tensor)) & (1 << 64) - 1:016x}"
            for name, tensor in plain.items()
        )
