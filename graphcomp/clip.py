"""Clipping by the norm of all gradients, over every stage, each parameter once."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from graphcomp.errors import PlanError

if TYPE_CHECKING:
    from graphcomp.step import CompiledStep


def clip_grad_norm_(step: CompiledStep, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
    """Scale the gradients in place so that their norm over the whole model is at most `max_norm`.

    The norm counts each parameter once, also one that several stages hold. norm_type: positive, or infinity.

    Returns the norm before clipping: 0-dim, on this rank's device, equal on all ranks; nothing waits for it. All ranks
    of a pipeline must call this. On one stage it is what `torch.nn.utils.clip_grad_norm_` computes.
    """
    if not (max_norm >= 0 and norm_type > 0):
        raise PlanError(
            "clip_grad_norm_ takes a non-negative norm and a positive norm type",
            got=f"max_norm={max_norm!r}, norm_type={norm_type!r}",
        )
    counted = [p.grad for p in step.counted_parameters() if p.grad is not None]
    norm = get_total_norm(counted, norm_type).to(step.layout.device)
    if step.layout.closing is not None:
        if math.isinf(norm_type):
            dist.all_reduce(norm, dist.ReduceOp.MAX, group=step.layout.closing)
        else:
            power = norm.double() ** norm_type
            dist.all_reduce(power, group=step.layout.closing)
            norm = (power ** (1 / norm_type)).to(norm.dtype)
    clip_grads_with_norm_(step.parameters(), max_norm, norm)
    return norm
