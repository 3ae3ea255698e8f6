"""Tensor ranks (axis `tp`): which models they can train together, and what they must have in common."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from graphcomp.compat.tensor_parallel import AXIS, is_part, parts
from graphcomp.errors import PlanError
from graphcomp.plan import Plan
from graphcomp.runtime.program.fingerprint import checksum


def check_parts(plan: Plan, model: nn.Module) -> None:
    """Raise PlanError for a DTensor in the model's state that a step under this plan cannot use. Without any effect."""
    for name, tensor in parts(model).items():
        form, mesh = f"{tensor.placements} over {tensor.device_mesh}", plan.mesh
        if is_part(tensor):
            if mesh is None or plan.axis(AXIS) == 1 or tensor.device_mesh != mesh[AXIS]:
                raise PlanError(
                    f"'{name}' is laid out over the axis '{AXIS}' of a mesh that is not the plan's",
                    expected=f"Plan(mesh=mesh) and parallelize_module(model, mesh['{AXIS}'], ...) with one mesh",
                    got=form,
                )
            if type(tensor.placements[0]) not in (Shard, Replicate):
                raise PlanError(
                    f"'{name}' is laid out over the tensor ranks in a way that a step cannot use",
                    expected="Shard or Replicate",
                    got=form,
                )
        elif plan.axis(AXIS) > 1:
            raise PlanError(
                f"'{name}' is laid out over another mesh than the plan's axis '{AXIS}'",
                expected=f"DTensors over mesh['{AXIS}'] alone, or plain tensors",
                got=form,
                do="leave the other axes to the plan",
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
