"""The reference: eager PyTorch, a plain loop over microbatches, nothing of the compiler."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from graphcomp.capture.batch import arguments, plain
from graphcomp.compat.closures import functions_differentiated
from graphcomp.compat.modules import own_buffers
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
    """Put gradients, buffers (also one that forward replaces) and the default random stream back afterwards."""
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    tables = [own_buffers(module) for module in model.modules()]
    places = [(table, key, buffer) for table in tables for key, buffer in table.items() if buffer is not None]
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    state = torch.get_rng_state()
    try:
        for parameter, _ in gradients:
            parameter.grad = None
        yield
    finally:
        torch.set_rng_state(state)
        for table, key, buffer in places:
            table[key] = buffer
        with torch.no_grad():
            for buffer, before in buffers:
                if not torch.equal(buffer, before):  # one that is an expanded view cannot be written, nor was it
                    buffer.copy_(before)
        for parameter, gradient in gradients:
            parameter.grad = gradient


class Totals:
    """Adds up what microbatches yield, in their order.

    counts: what each loss is divided by. first: how many of the microbatches are the first data rank's, which a metric
    that keeps its last value takes it from; None: all.
    """

    def __init__(self, counts: Mapping[str, float], first: int | None = None) -> None:
        self.counts, self.first, self.microbatches = counts, first, 0
        self.sums: dict[str, torch.Tensor] = {}
        self.metrics: dict[str, list[tuple[int, Metric]]] = {}

    def add(self, losses: Mapping[str, torch.Tensor], metrics: Mapping[str, Metric]) -> None:
        """One microbatch: its losses, not divided, and its metrics."""
        for name, total in losses.items():
            total = total.detach().double()
            self.sums[name] = self.sums[name] + total if name in self.sums else total
        for name, value in metrics.items():
            self.metrics.setdefault(name, []).append((self.microbatches, value))
        self.microbatches += 1

    def reference(self, gradients: Mapping[str, torch.Tensor | None], buffers: Mapping[str, torch.Tensor]) -> Reference:
        divided = {name: total / self.counts[name] for name, total in self.sums.items()}
        return Reference(
            loss=torch.stack(list(divided.values())).sum(),
            losses=divided,
            metrics={name: self._combined(values) for name, values in self.metrics.items()},
            gradients=dict(gradients),
            buffers=dict(buffers),
        )

    def _combined(self, found: Sequence[tuple[int, Metric]]) -> torch.Tensor:
        values = [torch.as_tensor(metric.value).detach().double() for _, metric in found]
        stacked = torch.stack(values)
        match found[0][1].reduction:
            case "sum":
                return stacked.sum()
            case "mean":
                return stacked.mean()
            case "max":
                return stacked.max()
            case "min":
                return stacked.min()
            case _:
                own = [
                    v for (place, _), v in zip(found, values, strict=True) if self.first is None or place < self.first
                ]
                return own[-1] if own else torch.zeros_like(values[0])


def run_eager(
    model: nn.Module,
    loss_fn: Callable[[Any, Any], Any] | None,
    microbatches: Sequence[Any],
    first: int | None = None,
) -> Reference:
    """The step's loss, metrics, gradients and buffers in eager mode: two loops, as the denominators come first.

    first: as for `Totals`. The model is left as it was.
    """
    counts = counts_of(model, loss_fn, microbatches)
    totals = Totals(counts, first)
    with untouched(model), torch.enable_grad(), functions_differentiated():
        for batch in microbatches:
            losses, metrics = eager_losses(model, loss_fn, batch)
            found = {name: total_of(loss) for name, loss in losses.items()}
            totals.add(found, metrics)
            objective, *others = [total / counts[name] for name, total in found.items()]
            for share in others:
                objective = objective + share
            objective.backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
        buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
        return totals.reference(gradients, buffers)


def counts_of(
    model: nn.Module, loss_fn: Callable[[Any, Any], Any] | None, microbatches: Sequence[Any]
) -> dict[str, float]:
    """What a step over these microbatches divides each loss by, counted in eager mode; never 0."""
    counts: dict[str, float] = {}
    with untouched(model), torch.no_grad():
        for batch in microbatches:
            for name, loss in eager_losses(model, loss_fn, batch)[0].items():
                if isinstance(loss, TokenLoss):
                    counts[name] = counts.get(name, 0.0) + float(loss.tokens)
                else:
                    counts[name] = len(microbatches)
    return {name: value or 1.0 for name, value in counts.items()}


def eager_losses(
    model: nn.Module, loss_fn: Callable[[Any, Any], Any] | None, batch: Any
) -> tuple[dict[str, TokenLoss | MeanLoss], dict[str, Metric]]:
    """The losses and metrics of one microbatch, by name, in eager mode."""
    batch = plain(batch)
    positional, named = arguments(model, batch)
    output = model(*positional, **named)
    return from_output(output) if loss_fn is None else normalize(loss_fn(output, batch))


def total_of(loss: TokenLoss | MeanLoss) -> torch.Tensor:
    """A loss that is not divided yet."""
    return loss.total if isinstance(loss, TokenLoss) else loss.value
