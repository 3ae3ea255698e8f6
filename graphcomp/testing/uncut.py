"""The uncut program of a step that draws random numbers: what every cut of it has to reproduce, draws included."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from graphcomp.compiler import GraphCompiler
from graphcomp.dispatch import Dispatcher
from graphcomp.ir import interp
from graphcomp.ir import signature as role
from graphcomp.losses import Metric
from graphcomp.plan import Plan
from graphcomp.testing.first_node import program_inputs
from graphcomp.testing.reference import Reference, Totals, counts_of, untouched


def run_uncut(
    model: nn.Module,
    loss_fn: Callable[[Any, Any], Any] | None,
    microbatches: Sequence[Any],
    seeds: Sequence[torch.Tensor],
    first: int | None = None,
) -> Reference:
    """Interpret the seeded joint program of each microbatch, operation by operation, in order.

    The programs are captured here; the tokens are counted by eager code. seeds: one for each microbatch. first: as for
    `Totals`. The model is left as it was.
    """
    # With several data ranks, draws are functions of the seed, as in every program that is cut.
    plan = Plan(backend="eager", max_programs=len(microbatches), quiet=True)
    compiler = GraphCompiler(model, loss_fn, plan, data_ranks=2)
    dispatcher = Dispatcher(compiler, next(model.parameters()).device)
    counts = counts_of(model, loss_fn, microbatches)
    totals = Totals(counts, first)
    gradients: dict[str, torch.Tensor | None] = {n: None for n, p in model.named_parameters() if p.requires_grad}
    every = dispatcher.select(microbatches, True)
    with untouched(model), torch.no_grad():
        for bound, seed in zip(every, seeds, strict=True):
            joint = bound.specialisation.joint
            given = program_inputs(model, joint, bound.leaves, bound.sizes, counts, seed)
            found = interp.run(joint.program, given)
            totals.add(
                {spec.name: found[role.Loss(spec.name)] for spec in joint.losses},
                {spec.name: Metric(found[role.Metric(spec.name)], spec.reduction) for spec in joint.metrics},
            )
            for what, value in found.items():
                if isinstance(what, role.Grad) and value is not None:
                    before = gradients[what.name]
                    gradients[what.name] = value if before is None else before + value
                elif isinstance(what, role.BufferUpdate):
                    model.get_buffer(what.name).copy_(value)
        buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    return totals.reference(gradients, buffers)
