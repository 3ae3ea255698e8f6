"""What a step returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from graphcomp.capture.joint import Joint, Opaque
from graphcomp.compat.pytree import tree_unflatten
from graphcomp.errors import StepError
from graphcomp.ir.signature import Output


@dataclass(frozen=True)
class StepResult:
    """The result of a step. Every tensor is 0-dim, lazy (reading it is the only synchronisation) and equal
    on all ranks.

    loss: the sum of all named losses over the whole step. losses: by name, each divided by its tokens.
    tokens: what each was divided by, before the guard against zero. metrics: by name, combined over
    microbatches and data ranks. microbatch_losses: the share of each microbatch of this pipeline in the
    loss, in order. outputs: one a microbatch, in the model's own type; None unless asked for.
    """

    loss: torch.Tensor
    losses: Mapping[str, torch.Tensor]
    tokens: Mapping[str, torch.Tensor]
    metrics: Mapping[str, torch.Tensor]
    microbatch_losses: tuple[torch.Tensor, ...]
    outputs: tuple[Any, ...] | None = None


def rebuild_output(joint: Joint, tensors: Mapping[str, torch.Tensor | None]) -> Any:
    """The model's own output for one microbatch, from its tensors by path; None where a tensor is not given.

    Raises StepError if a part of the output is of a kind that cannot be rebuilt.
    """
    opaque = next((leaf for leaf in joint.output_leaves if isinstance(leaf, Opaque)), None)
    if opaque is not None:
        raise StepError(
            f"the model's output cannot be returned: it holds a {opaque.kind}",
            where=f"output {opaque.path}",
            expected="tensors, plain values, and containers that are registered as pytrees",
            do="let the model leave it out (for a cache: use_cache=False), or register its type as a pytree",
        )
    if joint.output_tree is None:
        return None
    leaves = [tensors.get(leaf.path) if isinstance(leaf, Output) else leaf for leaf in joint.output_leaves]
    return tree_unflatten(leaves, joint.output_tree)
