"""Virtual ranks: all stages of a plan in this process, for tests and laptops, without a process group."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from graphcomp.call import BoundStep, Options, Ran
from graphcomp.capture import Joint
from graphcomp.compiler import GraphCompiler
from graphcomp.dispatch import Bound, Dispatcher
from graphcomp.engine import Engine
from graphcomp.errors import BatchError, StateError
from graphcomp.plan import Plan
from graphcomp.runtime.ranks.layout import Layout, make_layout
from graphcomp.runtime.results.hooks import Hook, Looking
from graphcomp.runtime.results.result import StepResult
from graphcomp.step import evaluating


class VirtualStep:
    """The step of a plan with all its stages in this process; may be run any number of times.

    data_ranks: how many pipelines, each with microbatches of its own. trace: in the place of `capture`, where several
        steps share their captures.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[[Any, Any], Any] | None = None,
        *,
        plan: Plan | None = None,
        data_ranks: int = 1,
        trace: Callable[..., Joint] | None = None,
    ) -> None:
        sharded = next((name for name, p in model.named_parameters() if isinstance(p, DTensor)), None)
        if sharded is not None:
            raise StateError(
                "virtual ranks need the whole model in this process",
                where=f"parameter '{sharded}'",
                expected="plain parameters",
                got="a parameter of which this rank holds a part",
                do="build the model anew and load its full state dict",
            )
        plan = plan or Plan()
        plan = replace(plan, mesh=None, stages=plan.stage_count, stages_per_rank=plan.stages_on_each)
        self.model, self.plan, self.data_ranks = model, plan, data_ranks
        self.compiler = GraphCompiler(model, loss_fn, plan, data_ranks=data_ranks, trace=trace)
        device = make_layout(plan, model).device
        ranks, each = tuple(range(plan.pipeline_ranks)), plan.stages_on_each
        layout = Layout(0, ranks, device, data_ranks=data_ranks, stages_per_rank=each)
        self._engine = Engine(self.compiler, layout, virtual=True)
        self._dispatcher = Dispatcher(self.compiler, device)
        self.latest: list[Bound] = []
        self.steps = 0

    def bind(self, microbatches: Sequence[Any], options: Options | None = None) -> BoundStep:
        """Everything up to the run; see `run`."""
        lines = [microbatches]
        if self.data_ranks > 1:
            lines = list(microbatches)
            if len(lines) != self.data_ranks:
                raise BatchError(
                    "every data rank needs a list of microbatches", expected=self.data_ranks, got=f"{len(lines)} lists"
                )
        return self._engine.bind(self._dispatcher, lines, options or Options())

    def run(
        self,
        microbatches: Sequence[Any],
        outputs: str = "none",
        *,
        loss_scale: float = 1.0,
        tokens: Mapping[str, torch.Tensor] | None = None,
        hooks: Sequence[Hook] = (),
    ) -> Ran:
        """One step. Buffers are written as a step does, `.grad` is not; gradients are in the result, whole.

        hooks: as those of a compiled step, for this one.

        microbatches: with several data ranks, a list for each of them; outputs and the shares of the microbatches then
        come in order of data ranks.
        """
        inspects = bool(hooks) or self.plan.check_finite
        step = self.bind(microbatches, Options(True, outputs, loss_scale, inspects=inspects).given(tokens or {}))
        self.latest = [one for line in step.lines for one in line.bound]
        ran = self._engine.run(step, tokens, Looking(self.steps, tuple(hooks)))
        self._engine.state.commit({}, ran.buffers)
        self.steps += 1
        return ran

    def evaluate(self, microbatches: Sequence[Any], outputs: str = "none") -> StepResult:
        """Forward and loss only, as a compiled step does it; microbatches as for `run`."""
        with evaluating(self.model, self._engine.layout.device):
            return self._engine.run(self.bind(microbatches, Options(False, outputs))).result


def run_virtual(
    model: nn.Module,
    loss_fn: Callable[[Any, Any], Any] | None,
    microbatches: Sequence[Any],
    *,
    plan: Plan | None = None,
    outputs: str = "none",
    data_ranks: int = 1,
) -> tuple[StepResult, dict[str, torch.Tensor | None]]:
    """One step of all stages of `plan` in this process, whatever `plan.stages`.

    data_ranks: how many pipelines; more than one: `microbatches` is a list of lists, one for each.
    Returns the result and the gradients: every trainable parameter by name, None where eager has None. `.grad` is left
    alone; buffers of `model` are as after a step.
    """
    ran = VirtualStep(model, loss_fn, plan=plan, data_ranks=data_ranks).run(microbatches, outputs)
    trainable = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    return ran.result, {name: ran.gradients.get(name) for name in trainable}
