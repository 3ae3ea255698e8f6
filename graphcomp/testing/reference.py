"""The reference: eager PyTorch, a plain loop over microbatches, nothing of the compiler."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from graphcomp.capture.batch import arguments, plain
from graphcomp.losses import MeanLoss, Metric, TokenLoss, from_output, normalize


@dataclass(frozen=True)
class Reference:
    """What eager yields for a step. losses: by name, already divided. gradients: None where eager has None."""

    loss: torch.Tensor
    losses: dict[str, torch.Tensor]
    metrics: dict[str, torch.Tensor]
    gradients: dict[str, torch.Tensor | None]
    buffers: dict[str, torch.Tensor]


@contextlib.contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Put gradients, buffers and the default random stream back afterwards."""
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    state = torch.get_rng_state()
    try:
        for parameter, _ in gradients:
            parameter.grad = None
        yield
    finally:
        torch.set_rng_state(state)
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        for parameter, gradient in gradients:
            parameter.grad = gradient


def run_eager(model: nn.Module, loss_fn: Callable[[Any, Any], Any] | None, microbatches: Sequence[Any]) -> Reference:
    """The step's loss, metrics, gradients and buffers in eager mode: two loops, as the denominators come first.

    The model is left as it was.
    """
    with untouched(model), torch.enable_grad():
        state = torch.get_rng_state()
        before = [buffer.detach().clone() for buffer in model.buffers()]
        with torch.no_grad():
            counts = _denominators(
                [eager_losses(model, loss_fn, batch)[0] for batch in microbatches], len(microbatches)
            )
            for buffer, old in zip(model.buffers(), before, strict=True):
                buffer.copy_(old)
        torch.set_rng_state(state)
        sums: dict[str, torch.Tensor] = {}
        seen: dict[str, list[Metric]] = {}
        for batch in microbatches:
            losses, metrics = eager_losses(model, loss_fn, batch)
            shares = [_total(loss) / counts[name] for name, loss in losses.items()]
            for name, loss in losses.items():
                total = _total(loss).detach().double()
                sums[name] = sums[name] + total if name in sums else total
            for name, value in metrics.items():
                seen.setdefault(name, []).append(value)
            objective = shares[0]
            for share in shares[1:]:
                objective = objective + share
            objective.backward()
        divided = {name: total / counts[name] for name, total in sums.items()}
        return Reference(
            loss=torch.stack(list(divided.values())).sum(),
            losses=divided,
            metrics={name: _combine(values) for name, values in seen.items()},
            gradients={n: p.grad for n, p in model.named_parameters() if p.requires_grad},
            buffers={name: buffer.detach().clone() for name, buffer in model.named_buffers()},
        )


def eager_losses(
    model: nn.Module, loss_fn: Callable[[Any, Any], Any] | None, batch: Any
) -> tuple[dict[str, TokenLoss | MeanLoss], dict[str, Metric]]:
    """The losses and metrics of one microbatch, by name, in eager mode."""
    batch = plain(batch)
    positional, named = arguments(model, batch)
    output = model(*positional, **named)
    return from_output(output) if loss_fn is None else normalize(loss_fn(output, batch))


def _denominators(found: Sequence[dict[str, TokenLoss | MeanLoss]], microbatches: int) -> dict[str, int | float]:
    counts: dict[str, int | float] = {}
    for losses in found:
        for name, loss in losses.items():
            if isinstance(loss, TokenLoss):
                counts[name] = counts.get(name, 0) + float(loss.tokens)
            else:
                counts[name] = microbatches
    return {name: value or 1 for name, value in counts.items()}


def _total(loss: TokenLoss | MeanLoss) -> torch.Tensor:
    return loss.total if isinstance(loss, TokenLoss) else loss.value


def _combine(values: Sequence[Metric]) -> torch.Tensor:
    stacked = torch.stack([torch.as_tensor(value.value).detach().double() for value in values])
    match values[0].reduction:
        case "sum":
            return stacked.sum()
        case "mean":
            return stacked.mean()
        case "max":
            return stacked.max()
        case "min":
            return stacked.min()
        case _:
            return stacked[-1]
