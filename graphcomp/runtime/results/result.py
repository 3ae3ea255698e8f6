"""What a step returns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from graphcomp.capture.joint import Joint, Number, Opaque
from graphcomp.compat.pytree import tree_unflatten
from graphcomp.errors import StepError
from graphcomp.ir.signature import Output
from graphcomp.ir.sizes import evaluator
from graphcomp.losses import Reduction


@dataclass(frozen=True)
class StepResult:
    """The result of a step. Every tensor is 0-dim, lazy (reading it is the only synchronisation) and equal
    on all ranks.

    loss: the sum of all named losses over the whole step. losses: by name, each divided by its tokens.
    tokens: what each was divided by, before the guard against zero. metrics: by name, combined over
    microbatches and data ranks. microbatch_losses: the share of each microbatch of this pipeline in the
    loss, in order. outputs: one a microbatch, in the model's own type; None unless asked for. reductions: by name, how
    a metric's values of all microbatches became one. counts: how many values a mean metric is the mean of.
    """

    loss: torch.Tensor
    losses: Mapping[str, torch.Tensor]
    tokens: Mapping[str, torch.Tensor]
    metrics: Mapping[str, torch.Tensor]
    microbatch_losses: tuple[torch.Tensor, ...]
    outputs: tuple[Any, ...] | None = None
    reductions: Mapping[str, Reduction] = field(default_factory=dict, repr=False)
    counts: Mapping[str, torch.Tensor] = field(default_factory=dict, repr=False)

    def as_dict(self) -> dict[str, torch.Tensor]:
        """Everything global, under names that a logger can take: `loss`, `losses/NAME`, `tokens/NAME`, `metrics/NAME`.

        Still lazy.
        """
        parts = {"losses": self.losses, "tokens": self.tokens, "metrics": self.metrics}
        return {"loss": self.loss} | {
            f"{part}/{n}": value for part, found in parts.items() for n, value in found.items()
        }

    def to_floats(self) -> dict[str, float]:
        """`as_dict()` as numbers: one transfer from the device, and so one wait, for all of them."""
        found = self.as_dict()
        return dict(zip(found, torch.stack([value.double() for value in found.values()]).tolist(), strict=True))


@dataclass(frozen=True)
class MicrobatchResult:
    """What a microbatch of this pipeline has yielded, as hooks are given it. Every tensor is 0-dim and lazy.

    step: how many training steps were completed before this one. index: in the step's list. loss: its share of the
    step's loss; losses: the same by name. metrics: its own values. output: the model's own output, if the step keeps
    any.
    """

    step: int
    index: int
    loss: torch.Tensor
    losses: Mapping[str, torch.Tensor]
    metrics: Mapping[str, torch.Tensor]
    output: Any = None


def combine(results: Iterable[StepResult]) -> StepResult:
    """The result of one call over the microbatches of several calls, each of which divided by its own tokens.

    So an evaluation in parts is weighted by tokens as one in a single call is: a loss is the sum of loss x tokens over
    the calls, divided by the sum of tokens; a mean metric is weighted by the number of its microbatches. Lazy. Shares
    of microbatches and outputs are left to the single results. Raises StepError if there is none.
    """
    parts = list(results)
    if not parts:
        raise StepError("there is no result to combine", do="evaluate at least one microbatch")
    losses, tokens, metrics, counts = {}, {}, {}, {}
    for name in dict.fromkeys(n for one in parts for n in one.losses):
        own = [one for one in parts if name in one.losses]
        tokens[name] = torch.stack([one.tokens[name] for one in own]).sum()
        total = torch.stack([one.losses[name] * one.tokens[name] for one in own]).sum()
        losses[name] = total / torch.where(tokens[name] == 0, 1, tokens[name])
    reductions = {name: kind for one in parts for name, kind in one.reductions.items()}
    for name, kind in reductions.items():
        own = [one for one in parts if name in one.metrics]
        values = torch.stack([one.metrics[name] for one in own])
        match kind:
            case "sum":
                metrics[name] = values.sum()
            case "max":
                metrics[name] = values.amax()
            case "min":
                metrics[name] = values.amin()
            case "last":
                metrics[name] = values[-1]
            case "mean":
                weights = torch.stack([one.counts[name] for one in own])
                counts[name] = weights.sum()
                # A call without this metric says nan, of weight 0.
                metrics[name] = torch.where(weights == 0, 0, values * weights).sum() / counts[name]
    return StepResult(torch.stack(list(losses.values())).sum(), losses, tokens, metrics, (), None, reductions, counts)


def rebuild_output(joint: Joint, tensors: Mapping[str, torch.Tensor | None], sizes: Mapping[str, int]) -> Any:
    """The model's own output for one microbatch, from its tensors by path; None where a tensor is not given.

    sizes: of the microbatch. Raises StepError if a part of the output is of a kind that cannot be rebuilt.
    """
    opaque = next((leaf for leaf in joint.output_leaves if isinstance(leaf, Opaque)), None)
    if opaque is not None:
        raise StepError(
            f"the model's output cannot be returned: it holds a {opaque.kind}",
            where=f"output {opaque.path}",
            expected="tensors, plain values, and containers that are registered as pytrees",
            do=opaque.do,
        )
    if joint.output_tree is None:
        return None
    formulas = [leaf.formula for leaf in joint.output_leaves if isinstance(leaf, Number)]
    numbers = iter(evaluator(formulas, list(sizes))(*sizes.values()) if formulas else ())
    leaves = [
        tensors.get(leaf.path) if isinstance(leaf, Output) else next(numbers) if isinstance(leaf, Number) else leaf
        for leaf in joint.output_leaves
    ]
    return tree_unflatten(leaves, joint.output_tree)
