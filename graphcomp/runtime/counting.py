"""Counts the tokens of a step by running the prologue of every microbatch, before anything else runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from graphcomp.compat.collective_operators import ALL_REDUCE, WAIT
from graphcomp.dataparallel.contribution import Contribution
from graphcomp.errors import LossError, StepError
from graphcomp.ir import signature as role
from graphcomp.ir.interp import boxed_callable
from graphcomp.ir.program import Program
from graphcomp.partition import Partitioned
from graphcomp.runtime.inputs import MicrobatchInputs
from graphcomp.runtime.layout import Layout
from graphcomp.runtime.prologue import Counts, count


class Counting:
    """Counts over the microbatches of this process and, with a group over data ranks, over theirs."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self._callables: dict[int, tuple[Program, Any]] = {}

    def count(
        self, microbatches: Sequence[MicrobatchInputs], cuts: Sequence[Partitioned], total: Contribution
    ) -> tuple[Counts, int]:
        """The counts, and how many collectives it took. total: what all data ranks report."""
        counted = [self._prologue(one, cut) for one, cut in zip(microbatches, cuts, strict=True)]
        used = 0

        def reduce(vector: torch.Tensor) -> torch.Tensor:
            nonlocal used
            if self.layout.data is None:
                return vector
            used += 1
            return WAIT(ALL_REDUCE(vector, "sum", self.layout.data.group_name))

        return count(total.losses, counted, self.layout.device, total.floating, reduce), used

    def replaced(self, counts: Counts, tokens: Mapping[str, Any] | None) -> Counts:
        """The counts with the denominators that the caller gives."""
        if tokens is None:
            return counts
        unknown = sorted(tokens.keys() - counts.tokens.keys())
        if unknown:
            raise StepError(
                f"the step has no loss named {', '.join(map(repr, unknown))}",
                where="step(..., tokens=...)",
                expected=f"names from {', '.join(map(repr, counts.tokens))}",
                got=", ".join(map(repr, tokens)),
                do="give what step.count(microbatches) returns",
            )
        found = dict(counts.tokens)
        for name, value in tokens.items():
            given = torch.as_tensor(value, device=self.layout.device)
            if given.dim() or given.is_complex():
                raise LossError(
                    f"the tokens of loss '{name}' are one number",
                    expected="a 0-dim tensor or a number",
                    got=given.shape,
                )
            found[name] = given.to(found[name].dtype if not given.is_floating_point() else torch.float64)
        below = {name: torch.where(value == 0, torch.ones_like(value), value) for name, value in found.items()}
        return Counts(found, below)

    def _prologue(self, one: MicrobatchInputs, cut: Partitioned) -> dict[str, torch.Tensor]:
        if cut.prologue is None:
            return {}
        program, call = self._callables.get(id(cut.prologue), (None, None))
        if program is not cut.prologue:
            program, call = self._callables[id(cut.prologue)] = cut.prologue, boxed_callable(cut.prologue)
        with torch.no_grad():
            values = call([_input(what, one, cut) for what in program.inputs])
        return {
            what.loss: value
            for what, value in zip(program.outputs, values, strict=True)
            if isinstance(what, role.Tokens)
        }


def _input(what: role.Role, one: MicrobatchInputs, cut: Partitioned) -> Any:
    match what:
        case role.BatchLeaf(path):
            return one.leaves[path]
        case role.Size(symbol):
            return one.sizes[symbol]
        case role.Constant(name):
            return cut.joint.program.constants[name]
        case role.Captured(name):
            return cut.joint.captured[name].read()
    raise StepError(f"the prologue has an input it may not have: {what}")
