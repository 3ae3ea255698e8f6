"""Parity: the compiled step against eager PyTorch, for a user's own model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from graphcomp.capture import Joint
from graphcomp.compiler import GraphCompiler
from graphcomp.errors import ParityError, StepError
from graphcomp.ir import signature as role
from graphcomp.plan import Plan
from graphcomp.runtime.result import StepResult
from graphcomp.step import CompiledStep, compile_train_step
from graphcomp.testing.first_node import first_node_that_differs
from graphcomp.testing.reference import Reference, run_eager, untouched
from graphcomp.testing.virtual import VirtualStep

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 5e-3}


@dataclass(frozen=True)
class Row:
    """One comparison. kind: loss, metric, gradient or buffer. relative: to the largest absolute value of eager's."""

    kind: str
    name: str
    absolute: float
    relative: float


@dataclass(frozen=True)
class ParityTable:
    """All comparisons of a step; prints itself, the largest differences first within each kind."""

    rows: tuple[Row, ...]

    def worst(self, kind: str) -> Row | None:
        return max((row for row in self.rows if row.kind == kind), key=lambda row: row.relative, default=None)

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __str__(self) -> str:
        width = max([4, *(len(row.name) for row in self.rows)])
        lines = [f"{'kind':<9} {'name':<{width}} {'absolute':>10} {'relative':>10}"]
        lines += [f"{r.kind:<9} {r.name:<{width}} {r.absolute:>10.2e} {r.relative:>10.2e}" for r in self.rows]
        return "\n".join(lines)


def check_parity(
    model: nn.Module,
    loss_fn: Callable[[Any, Any], Any] | None,
    microbatches: Sequence[Any],
    *,
    plan: Plan | None = None,
    tolerance: float | None = None,
    step: CompiledStep | None = None,
) -> ParityTable:
    """Compare one step under `plan` with eager PyTorch: loss, every metric, every gradient by name, every buffer.

    With a mesh, every rank calls this with the same microbatches, and each compares what it owns; without one, all
    stages run in this process. step: an already compiled step to compare, in the place of a new one.
    tolerance: largest relative difference; None: by the parameters' dtype (1e-9 in fp64, 1e-5 in fp32).

    The model is left as it was. Raises ParityError with the first difference and the first graph node that differs.
    """
    microbatches = list(microbatches)
    plan = step.plan if step is not None else plan or Plan()
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.requires_grad}
    limit = tolerance if tolerance is not None else max(TOLERANCE.get(dtype, 1e-5) for dtype in dtypes)
    eager = run_eager(model, loss_fn, microbatches)
    with untouched(model):
        result, gradients, compiler, joint = _run(model, loss_fn, microbatches, plan, step)
        buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    joints = [one.joint for one in compiler.specialisations]
    if compiler.is_cut and any(role.Seed() in joint.program.inputs for joint in joints):
        raise StepError(
            "a model with random operations cannot be compared with eager under a cut plan: the two draw differently",
            do="call model.eval() first, or compare with one stage on one process",
        )
    table = ParityTable(tuple(_rows(eager, result, gradients, _written(buffers, compiler))))
    bad = next((row for row in table.rows if not row.relative <= limit), None)
    if bad is not None:
        raise ParityError(
            f"{bad.kind} '{bad.name}' differs from eager PyTorch",
            where=first_node_that_differs(model, loss_fn, microbatches[0], joint, limit),
            expected=f"a relative difference of at most {limit:.0e}",
            got=f"{bad.relative:.2e} relative, {bad.absolute:.2e} absolute",
            do="run with Plan(backend='eager') to see whether the difference comes from the compiler backend",
        )
    return table


def _run(
    model: nn.Module, loss_fn: Any, microbatches: Sequence[Any], plan: Plan, step: CompiledStep | None
) -> tuple[StepResult, dict[str, torch.Tensor | None], GraphCompiler, Joint]:
    if plan.mesh is None and step is None:
        virtual = VirtualStep(model, loss_fn, plan=plan)
        ran = virtual.run(microbatches)
        virtual_gradients = {n: ran.gradients.get(n) for n, p in model.named_parameters() if p.requires_grad}
        return ran.result, virtual_gradients, virtual.compiler, virtual.latest[0].specialisation.joint
    step = step or compile_train_step(model, loss_fn, plan=plan)
    result = step(microbatches)
    gradients = {n: p.grad for n, p in step.named_parameters() if p.requires_grad}
    return result, gradients, step.compiler, step.latest[0].joint


def _written(buffers: dict[str, torch.Tensor], compiler: GraphCompiler) -> dict[str, torch.Tensor]:
    """The buffers that this process's stages may write; others keep their values on a rank of a pipeline."""
    last = compiler.specialisations[-1]
    names = {
        what.name
        for cut in last.partitions.values()
        for stage in cut.stages
        if any(stage.index == key[1] for key in last.callables)
        for what in stage.forward.outputs
        if isinstance(what, role.BufferUpdate)
    }
    return {name: value for name, value in buffers.items() if name in names}


def _rows(
    eager: Reference, result: StepResult, gradients: Mapping[str, Any], buffers: dict[str, torch.Tensor]
) -> list[Row]:
    rows = [_row("loss", "loss", eager.loss, result.loss)]
    rows += [_row("loss", name, eager.losses[name], result.losses.get(name)) for name in eager.losses if name != "loss"]
    rows += [_row("metric", name, eager.metrics[name], result.metrics.get(name)) for name in eager.metrics]
    rows += [_row("gradient", name, eager.gradients[name], gradient) for name, gradient in gradients.items()]
    rows += [_row("buffer", name, eager.buffers[name], buffer) for name, buffer in buffers.items()]
    return rows


def _row(kind: str, name: str, expected: torch.Tensor | None, found: torch.Tensor | None) -> Row:
    if expected is None and found is None:
        return Row(kind, name, 0.0, 0.0)
    if expected is None or found is None:
        return Row(kind, name, float("inf"), float("inf"))
    wide_expected, wide_found = expected.detach().double(), found.detach().double()
    if wide_expected.shape != wide_found.shape:
        return Row(kind, name, float("inf"), float("inf"))
    if wide_expected.numel() == 0 or torch.equal(wide_expected, wide_found):
        return Row(kind, name, 0.0, 0.0)
    absolute = float((wide_expected - wide_found).abs().max())
    scale = float(wide_expected.abs().max())
    return Row(kind, name, absolute, absolute / scale if scale > 0 else absolute)
