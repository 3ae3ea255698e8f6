"""The uncut joint program, run microbatch by microbatch: what every cut and every schedule has to reproduce."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from graphcomp.dispatch import Bound
from graphcomp.ir import interp, meta
from graphcomp.ir import signature as role
from graphcomp.ir.randomness import step_seeds


@dataclass(frozen=True)
class Uncut:
    losses: list[dict[str, torch.Tensor]]
    gradients: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]


def run_uncut(model: nn.Module, bound: Sequence[Bound], denominators: Mapping[str, torch.Tensor]) -> Uncut:
    """Interpret the joint program of each microbatch in order; gradients are summed in that order. Model unchanged."""
    state: dict[role.Role, Any] = {role.Param(name): p.detach() for name, p in model.named_parameters()}
    buffers = {name: b.detach().clone() for name, b in model.named_buffers()}
    seeded = any(role.Seed() in one.specialisation.joint.program.inputs for one in bound)
    seeds = step_seeds(len(bound)) if seeded else [None] * len(bound)
    losses, gradients = [], {}
    for one, seed in zip(bound, seeds, strict=True):
        program = one.specialisation.joint.program
        given = state | {role.Buffer(name): value for name, value in buffers.items()}
        given |= {role.BatchLeaf(path): leaf for path, leaf in one.leaves.items()}
        given |= {role.Size(symbol): size for symbol, size in one.sizes.items()}
        given |= {role.Denominator(name): value for name, value in denominators.items()}
        given[role.Seed()] = seed
        for what, node in program.input_nodes():
            if isinstance(what, role.LossScale):
                given[what] = torch.ones((), dtype=meta.tensor(node).dtype)
        with torch.no_grad():
            found = interp.run(program, {what: given[what] for what in program.inputs if what in given})
        losses.append({what.name: value for what, value in found.items() if isinstance(what, role.Loss)})
        for what, value in found.items():
            if isinstance(what, role.BufferUpdate):
                buffers[what.name] = value
            elif isinstance(what, role.Grad) and value is not None:
                gradients[what.name] = gradients[what.name] + value if what.name in gradients else value
    return Uncut(losses, gradients, buffers)
