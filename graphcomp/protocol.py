"""The trainer's four lines: prepare a batch, forward, backward, optimizer; the same text under every plan."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from graphcomp.capture.batch import prepares_batches
from graphcomp.errors import PlanError
from graphcomp.plan import Plan
from graphcomp.runtime.results.result import StepResult
from graphcomp.runtime.state.held import HeldStep
from graphcomp.step import CompiledStep, Outputs, compile_train_step

Inputs = TypeVar("Inputs")
Batch = TypeVar("Batch")
InputsIn = TypeVar("InputsIn", contravariant=True)
BatchOut = TypeVar("BatchOut", covariant=True)


class HasLoss(Protocol):
    """What a model's forward returns: `loss` is a 0-dim tensor, or any form of loss that a loss function may return."""

    @property
    def loss(self) -> Any: ...


class Trainable(Protocol[InputsIn, BatchOut]):
    """An `nn.Module` that prepares its own batches.

    prepare_batch: plain Python on the host, outside of the program; what it returns is the program's input: any
        registered pytree, or a list of them, which are a step's microbatches.
    forward: of one microbatch, whole, in its own type.
    """

    def prepare_batch(self, inputs: InputsIn, /) -> BatchOut: ...

    def forward(self, batch: Any, /) -> HasLoss: ...


@dataclass(frozen=True)
class StepOutput:
    """What a compiled forward returns. loss: of the whole step, real and equal on all ranks; `loss.backward()` adds the
    step's gradients, times whatever the loss was multiplied by, to `.grad`. result: all that the step reports.
    """

    loss: torch.Tensor
    result: StepResult

    @property
    def outputs(self) -> tuple[Any, ...] | None:
        """The model's own outputs, one a microbatch; None unless `compile(..., outputs=...)` asks for them."""
        return self.result.outputs


class CompiledModel(Generic[Inputs, Batch]):
    """A model under a plan, as a trainer uses it. Made by `compile`. model: the user's own. step: the compiled step."""

    def __init__(self, model: Trainable[Inputs, Batch], step: CompiledStep, outputs: Outputs) -> None:
        self._prepares, self.step, self.outputs = model, step, outputs

    @property
    def model(self) -> nn.Module:
        return self.step.model

    def prepare_batch(self, inputs: Inputs) -> Batch:
        """The model's own."""
        return self._prepares.prepare_batch(inputs)

    def forward(self, batch: Batch | list[Any]) -> StepOutput:
        """Forward and backward of a step over this microbatch, or these, if it is a list; all ranks must call it.

        Gradients wait in memory of their own, one for each parameter that this rank owns, until `loss.backward()` adds
        them to `.grad`, or the output is dropped. That may be called once for each forward. Under `no_grad` it is
        `step.evaluate` instead: eval mode, nothing changed, nothing to call backward on.
        """
        microbatches = batch if isinstance(batch, list) else [batch]
        if not torch.is_grad_enabled():
            result = self.step.evaluate(microbatches, self.outputs)
            return StepOutput(result.loss, result)
        held = self.step.hold(microbatches, self.outputs)
        value = held.result.loss
        return StepOutput(_Loss.apply(torch.zeros_like(value, requires_grad=True), value, held), held.result)

    __call__ = forward

    @property
    def training(self) -> bool:
        return self.model.training

    def train(self, mode: bool = True) -> CompiledModel[Inputs, Batch]:
        self.model.train(mode)
        return self

    def eval(self) -> CompiledModel[Inputs, Batch]:
        return self.train(False)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Those that this rank owns: as of the step."""
        return self.step.named_parameters()

    def parameters(self) -> Iterator[nn.Parameter]:
        return self.step.parameters()


class _Loss(torch.autograd.Function):
    """The loss, with a backward that hands over gradients which are there already. leaf: so that it requires one."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor, value: torch.Tensor, held: HeldStep) -> torch.Tensor:
        ctx.held = held
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None, None]:
        ctx.held.deposit(gradient)
        return None, None, None


def compile(
    model: Trainable[Inputs, Batch],
    *,
    plan: Plan | None = None,
    outputs: Outputs = "none",
    saved: str | Path | None = None,
) -> CompiledModel[Inputs, Batch]:
    """Compile a model that prepares its own batches, for a trainer of four lines:

        batch = model.prepare_batch(inputs)
        out = model.forward(batch)
        out.loss.backward()
        optimizer.step()

    outputs: which of the model's own outputs to keep: as for a step. saved: a folder that `model.step.save(folder)` has
    written, to capture and compile nothing that is in it: see `load`, and its warning.

    The model stays the user's own object, with its parameters; nothing is captured before the first forward. Raises
    PlanError, without any effect, for a model that is no `nn.Module` with `prepare_batch(inputs)` and `forward(batch)`,
    and what `compile_train_step` and `load` raise.
    """
    if not (isinstance(model, nn.Module) and prepares_batches(model)):
        raise PlanError(
            "compile takes a model that prepares its own batches",
            where=type(model).__name__,
            expected="an nn.Module with prepare_batch(inputs) and forward(batch), whose output has `.loss`",
            do="add prepare_batch, or use compile_train_step(model, loss_fn, plan=...)",
        )
    step = compile_train_step(model, plan=plan)
    if saved is not None:
        step.take_over(saved)
    return CompiledModel(model, step, outputs)
