"""The oracle: eager PyTorch, one process, a plain loop over all microbatches of all data ranks.

It reads the fields of the loss objects and nothing else of the package that it judges.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from graphcomp.losses import MeanLoss, Metric, TokenLoss


@dataclass
class Reference:
    """What a step must yield.

    tokens: by the names of the token losses. gradients: every trainable name, None where eager leaves None.
    """

    loss: Tensor
    losses: dict[str, Tensor]
    tokens: dict[str, int | float]
    metrics: dict[str, Tensor]
    microbatch_losses: list[Tensor]
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]
    outputs: list[Any] = field(repr=False)


def reference(
    model: nn.Module,
    loss_fn: Callable[[Any, Any], Any] | None,
    microbatches: Sequence[Any],
    dtype: torch.dtype | None = None,
    backward: bool = True,
) -> Reference:
    """One step on a copy of `model`, which stays as it is; random numbers are drawn from the global stream.

    dtype: compute in this dtype (parameters, buffers, floating batch leaves); None: as it comes.
    backward: False to evaluate; the caller chooses the mode of the model.
    """
    model = copy.deepcopy(model)
    model.zero_grad()
    if dtype is not None:
        model = model.to(dtype)
        microbatches = [tree_map(lambda leaf: _convert(leaf, dtype), batch) for batch in microbatches]
    tokens = _count(copy.deepcopy(model), loss_fn, microbatches)
    shares: list[dict[str, Tensor]] = []
    reports: list[dict[str, Metric]] = []
    outputs = []
    with torch.set_grad_enabled(backward):
        for batch in microbatches:
            output, losses, metrics = _run(model, loss_fn, batch)
            share = {}
            for name, loss in losses.items():
                if isinstance(loss, TokenLoss):
                    share[name] = loss.total / (tokens[name] if tokens[name] != 0 else 1)
                else:
                    share[name] = loss.value / len(microbatches)
            objective = sum(share.values())
            if backward:
                objective.backward()
            shares.append({name: part.detach() for name, part in share.items()})
            reports.append(metrics)
            outputs.append(tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, output))
    names = dict.fromkeys(name for share in shares for name in share)
    totals = {name: sum(share[name] for share in shares if name in share) for name in names}
    return Reference(
        loss=sum(totals.values()),
        losses=totals,
        tokens=tokens,
        metrics={name: _reduce([report[name] for report in reports]) for name in reports[0]},
        microbatch_losses=[sum(share.values()) for share in shares],
        gradients={name: p.grad for name, p in model.named_parameters() if p.requires_grad},
        buffers={name: buffer.detach().clone() for name, buffer in model.named_buffers()},
        outputs=outputs,
    )


def call(model: nn.Module, batch: Any) -> Any:
    """A dict goes by name, as far as the forward takes the names; a tuple by position; the rest as it is."""
    parameters = inspect.signature(model.forward).parameters
    if isinstance(batch, Mapping):
        takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        return model(**{name: value for name, value in batch.items() if takes_all or name in parameters})
    if isinstance(batch, tuple):
        takes_all = any(p.kind is p.VAR_POSITIONAL for p in parameters.values())
        return model(*(batch if takes_all else batch[: len(parameters)]))
    return model(batch)


def _run(model: nn.Module, loss_fn: Callable[[Any, Any], Any] | None, batch: Any) -> tuple[Any, dict, dict]:
    output = call(model, batch)
    result = loss_fn(output, batch) if loss_fn else output.loss
    losses, metrics = result if isinstance(result, tuple) else (result, {})
    named = losses if isinstance(losses, Mapping) else {"loss": losses}
    return (
        output,
        {name: MeanLoss(loss) if isinstance(loss, Tensor) else loss for name, loss in named.items()},
        {name: value if isinstance(value, Metric) else Metric(value) for name, value in metrics.items()},
    )


def _count(scratch: nn.Module, loss_fn: Callable[[Any, Any], Any] | None, microbatches: Sequence[Any]) -> dict:
    """The tokens of the whole step by loss name, found on a copy and without moving the random stream."""
    found: dict[str, int | float] = {}
    with torch.random.fork_rng(), torch.no_grad():
        for batch in microbatches:
            _, losses, _ = _run(scratch, loss_fn, batch)
            for name, loss in losses.items():
                if isinstance(loss, TokenLoss):
                    found[name] = found.get(name, 0) + torch.as_tensor(loss.tokens).sum().item()
    return found


def _reduce(values: list[Metric]) -> Tensor:
    stacked = torch.stack([torch.as_tensor(each.value).detach() for each in values])
    match values[0].reduction:
        case "mean":
            return stacked.to(torch.promote_types(stacked.dtype, torch.float32)).mean()
        case "last":
            return stacked[-1]
        case other:
            return {"sum": torch.sum, "max": torch.max, "min": torch.min}[other](stacked)


def _convert(leaf: Any, dtype: torch.dtype) -> Any:
    return leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf
