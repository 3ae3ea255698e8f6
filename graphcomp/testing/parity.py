"""Parity: the compiled step against eager PyTorch, for a user's own model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from graphcomp.capture import Joint
from graphcomp.compat.sharded import local_rows, rows_like
from graphcomp.compat.tensor_parallel import over_tensor_ranks, parts
from graphcomp.compiler import GraphCompiler
from graphcomp.errors import ParityError, PlanError, StepError
from graphcomp.ir import signature as role
from graphcomp.ir.randomness import step_seeds
from graphcomp.plan import Plan
from graphcomp.step import CompiledStep, compile_train_step
from graphcomp.testing.compared import Compared, Found, Process, Virtual
from graphcomp.testing.first_node import first_node_that_differs
from graphcomp.testing.reference import Reference, run_eager, untouched
from graphcomp.testing.uncut import run_uncut
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
    step: CompiledStep | VirtualStep | None = None,
    data_ranks: int = 1,
) -> ParityTable:
    """Compare one step under `plan` with eager PyTorch: loss, every metric, every gradient by name, every buffer.

    The reference is one process and one loop over the microbatches of all data ranks, in their order.

    With a mesh, every rank calls this with the microbatches of its pipeline, and each compares what it owns, of sharded
    gradients its rows. Without one, all ranks are in this process; data_ranks: how many pipelines; more than one:
    `microbatches` is a list of lists, one for each. step: an already compiled step to compare, or one of virtual ranks,
    in the place of a new one. tolerance: largest relative difference; None: by the parameters' dtype (1e-9 in fp64,
    1e-5 in fp32).

    A plan that is cut, or has a mesh, draws other random numbers than eager PyTorch. Of a model that draws any, the
    program of one stage, which draws eager's, is compared with eager; then the step with the uncut program that it was
    cut from, run microbatch by microbatch on the same seeds. That one is in the table.

    The model is left as it was, but for what the first step over data ranks does: parameters and buffers get the values
    of the first data rank, and parameters are sharded if the plan says so. Raises ParityError with the first difference
    and the first graph node that differs.
    """
    if data_ranks > 1 and (step is not None or (plan is not None and plan.mesh is not None)):
        raise PlanError(
            "the number of data ranks is that of the mesh",
            where="check_parity(data_ranks=...)",
            expected="data_ranks only where there is no mesh and no step",
            do="leave `data_ranks` out; every rank gives its own microbatches",
        )
    part = next((name for name, tensor in parts(model).items() if over_tensor_ranks(tensor)), None)
    if part is not None:
        raise PlanError(
            "a model that is laid out over tensor ranks has no eager reference in one process",
            where=f"'{part}'",
            do="compare the model as it is before parallelize_module, on a mesh without the axis 'tp'",
        )
    compared = _compared(model, loss_fn, list(microbatches), plan or Plan(), step, data_ranks)
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.requires_grad}
    limit = tolerance if tolerance is not None else max(TOLERANCE.get(dtype, 1e-5) for dtype in dtypes)
    every, first = [batch for line in compared.lines for batch in line], len(compared.lines[0])
    with untouched(model):
        found = compared.run()
        buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    joints = [one.joint for one in compared.compiler.specialisations]
    _check_comparable(joints, compared)
    uncut = compared.compiler.is_cut and any(role.Seed() in joint.program.inputs for joint in joints)
    with compared.whole():
        if uncut:
            one_stage = Plan(backend="eager", max_programs=len(every), quiet=True)
            check_parity(model, loss_fn, every, plan=one_stage, tolerance=tolerance)
            with untouched(model):
                seeds = compared.agreed(torch.stack(step_seeds(len(every))))
            expected = run_uncut(model, loss_fn, every, seeds.unbind(), first)
        else:
            expected = run_eager(model, loss_fn, every, first)
        table = ParityTable(tuple(_rows(expected, found, _written(buffers, compared.compiler))))
        bad = next((row for row in table.rows if not row.relative <= limit), None)
        if bad is None:
            return table
        place = "behind the capture: the uncut program, with the same random numbers, gives another value"
        raise ParityError(
            f"{bad.kind} '{bad.name}' differs from {'the uncut program' if uncut else 'eager PyTorch'}",
            where=place if uncut else first_node_that_differs(model, loss_fn, found.first, found.joint, limit),
            expected=f"a relative difference of at most {limit:.0e}",
            got=f"{bad.relative:.2e} relative, {bad.absolute:.2e} absolute",
            do="run with Plan(backend='eager') to see whether the difference comes from the compiler backend",
        )


def _compared(
    model: nn.Module,
    loss_fn: Any,
    microbatches: list[Any],
    plan: Plan,
    step: CompiledStep | VirtualStep | None,
    data_ranks: int,
) -> Compared:
    if isinstance(step, VirtualStep):
        return Virtual(step, microbatches)
    if step is None and plan.mesh is None:
        return Virtual(VirtualStep(model, loss_fn, plan=plan, data_ranks=data_ranks), microbatches)
    return Process(step or compile_train_step(model, loss_fn, plan=plan), microbatches)


def _check_comparable(joints: Sequence[Joint], compared: Compared) -> None:
    names = sorted({name for joint in joints for name in joint.groups})
    if names and len(compared.lines) > 1:
        raise StepError(
            "a model that communicates cannot be compared with one process, where there are several data ranks",
            got=f"collectives over {', '.join(names)}",
            do="compare it with one data rank",
        )


def _written(buffers: dict[str, torch.Tensor], compiler: GraphCompiler) -> dict[str, torch.Tensor]:
    """The buffers that this process's stages may write; others keep their values on a rank of a pipeline."""
    names = {
        what.name
        for one in compiler.specialisations
        for cut in one.partitions.values()
        for stage in cut.stages
        if any(stage.index == key[1] for key in one.callables)
        for program in stage.programs
        for what in program.outputs
        if isinstance(what, role.BufferUpdate)
    }
    return {name: value for name, value in buffers.items() if name in names}


def _rows(expected: Reference, found: Found, buffers: Mapping[str, torch.Tensor]) -> list[Row]:
    result = found.result
    rows = [_row("loss", "loss", expected.loss, result.loss)]
    rows += [_row("loss", n, loss, result.losses.get(n)) for n, loss in expected.losses.items() if n != "loss"]
    rows += [_row("metric", name, value, result.metrics.get(name)) for name, value in expected.metrics.items()]
    rows += [_row("gradient", n, expected.gradients[n], gradient) for n, gradient in found.gradients.items()]
    rows += [_row("buffer", name, expected.buffers[name], buffer) for name, buffer in buffers.items()]
    return rows


def _row(kind: str, name: str, expected: torch.Tensor | None, found: torch.Tensor | None) -> Row:
    if expected is None and found is None:
        return Row(kind, name, 0.0, 0.0)
    if expected is None or found is None or expected.shape != found.shape:
        return Row(kind, name, float("inf"), float("inf"))
    wide = torch.promote_types(expected.dtype, torch.float64)
    scale = float(expected.to(wide).abs().max()) if expected.numel() else 0.0
    part = local_rows(rows_like(found, expected)) if isinstance(found, DTensor) else expected
    own, theirs = local_rows(found.detach()).to(wide), part.detach().to(wide)
    if own.numel() == 0 or torch.equal(own, theirs):
        return Row(kind, name, 0.0, 0.0)
    absolute = float((theirs - own).abs().max())
    return Row(kind, name, absolute, absolute / scale if scale > 0 else absolute)
