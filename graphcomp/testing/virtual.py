"""Virtual ranks: all stages of a plan in this process, for tests and laptops, without a process group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from graphcomp.compiler import GraphCompiler
from graphcomp.dispatch import Bound, Dispatcher
from graphcomp.engine import Engine, Ran, bind
from graphcomp.plan import Plan
from graphcomp.runtime.layout import Layout, make_layout
from graphcomp.runtime.result import StepResult


class VirtualStep:
    """The step of a plan with all its stages in this process; may be run any number of times."""

    def __init__(
        self, model: nn.Module, loss_fn: Callable[[Any, Any], Any] | None = None, *, plan: Plan | None = None
    ) -> None:
        plan = replace(plan or Plan(), mesh=None, stages=(plan or Plan()).stage_count)
        self.model, self.plan = model, plan
        self.compiler = GraphCompiler(model, loss_fn, plan)
        device = make_layout(plan, model).device
        self._engine = Engine(self.compiler, Layout(0, tuple(range(plan.stage_count)), device), virtual=True)
        self._dispatcher = Dispatcher(self.compiler, device)
        self.latest: list[Bound] = []

    def run(self, microbatches: Sequence[Any], outputs: str = "none", *, loss_scale: float = 1.0) -> Ran:
        """One step. Buffers are written as a step does, `.grad` is not; gradients are in the result."""
        self.latest = bind(self._dispatcher, self._engine, microbatches, outputs=outputs)
        ran = self._engine.run(self.latest, outputs, loss_scale)
        self._engine.state.commit({}, ran.buffers)
        return ran


def run_virtual(
    model: nn.Module,
    loss_fn: Callable[[Any, Any], Any] | None,
    microbatches: Sequence[Any],
    *,
    plan: Plan | None = None,
    outputs: str = "none",
) -> tuple[StepResult, dict[str, torch.Tensor | None]]:
    """One step of all stages of `plan` in this process, whatever `plan.stages`.

    Returns the result and the gradients: every trainable parameter by name, None where eager has None. `.grad` is left
    alone; buffers of `model` are as after a step.
    """
    ran = VirtualStep(model, loss_fn, plan=plan).run(microbatches, outputs)
    trainable = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    return ran.result, {name: ran.gradients.get(name) for name in trainable}
