"""Clipping by the norm of all gradients, over all stages and all parts of parameters, each parameter once."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from graphcomp.compat.sharded import local_rows
from graphcomp.compat.tensor_parallel import AXIS
from graphcomp.errors import PlanError

if TYPE_CHECKING:
    from graphcomp.step import CompiledStep


def clip_grad_norm_(step: CompiledStep, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
    """Scale the gradients in place so that their norm over the whole model is at most `max_norm`.

    The norm counts each parameter once: also one that several stages hold, one that every data or tensor rank holds
    whole, and one of which each of them holds a part. norm_type: positive, or infinity.

    Returns the norm before clipping: 0-dim, on this rank's device, equal on all ranks; nothing waits for it. All ranks
    must call this. In one process it is what `torch.nn.utils.clip_grad_norm_` computes.

    Raises RankFailure where another rank has failed or is gone.
    """
    if not (max_norm >= 0 and norm_type > 0):
        raise PlanError(
            "clip_grad_norm_ takes a non-negative norm and a positive norm type",
            got=f"max_norm={max_norm!r}, norm_type={norm_type!r}",
        )
    return step.together("clipping gradients", lambda: _clip(step, max_norm, norm_type))


def _clip(step: CompiledStep, max_norm: float, norm_type: float) -> torch.Tensor:
    # What is whole is the same on all ranks along an axis: the first one counts it.
    firsts = {axis for axis, rank in (("data", step.layout.data_rank), ("tp", step.layout.tensor_rank)) if rank == 0}
    counted = [one for one in _held(step.counted_parameters()) if firsts | one.split_over >= {"data", "tp"}]
    own = [one.grad for one in counted if one.grad.numel()]  # no rows have no largest element
    norm = get_total_norm(own, norm_type).to(step.layout.device)
    layout = step.layout
    groups = [group for group in (layout.data, layout.tensor, layout.closing) if group is not None]
    if groups:
        power = norm.double() if math.isinf(norm_type) else norm.double() ** norm_type
        for group in groups:
            power = _combined(power, group, norm_type)
        # A rank without gradients has no dtype to go by.
        dtype = reduce(torch.promote_types, [p.dtype for p in step.model.parameters() if p.requires_grad])
        norm = (power if math.isinf(norm_type) else power ** (1 / norm_type)).to(dtype)
    clip_grads_with_norm_(_held(step.parameters()), max_norm, norm)  # type: ignore[arg-type]
    return norm


def _combined(power: torch.Tensor, group: dist.ProcessGroup, norm_type: float) -> torch.Tensor:
    """Over a group. Gathered, then added up in one order: so all ranks come to the same bits, in every group."""
    everyone = power.new_empty(group.size())
    dist.all_gather_single(everyone, power.view(1), group=group)
    return everyone.amax() if math.isinf(norm_type) else everyone.sum()


@dataclass(frozen=True)
class _Held:
    """A gradient as this rank has it in memory, and the axes along which other ranks have other parts of it: "tp", and
    "data" for data ranks."""

    grad: torch.Tensor
    split_over: frozenset[str]


def _held(parameters: Iterable[torch.Tensor]) -> list[_Held]:
    gradients = [p.grad for p in parameters if p.grad is not None]
    return [_Held(local_rows(gradient), _split_over(gradient)) for gradient in gradients]


def _split_over(gradient: torch.Tensor) -> frozenset[str]:
    if not isinstance(gradient, DTensor):
        return frozenset()
    axes = zip(gradient.device_mesh.mesh_dim_names or (), gradient.placements, strict=True)
    return frozenset(AXIS if axis == AXIS else "data" for axis, one in axes if not one.is_replicate())
