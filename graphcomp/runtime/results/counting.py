"""Counts the tokens of a step by running the prologue of every microbatch, before anything else runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from graphcomp.compat.collective_operators import ALL_REDUCE, WAIT
from graphcomp.dataparallel.contribution import Contribution
from graphcomp.errors import StepError
from graphcomp.ir import signature as role
from graphcomp.ir.interp import as_written, boxed_callable
from graphcomp.ir.program import Program
from graphcomp.partition import Partitioned
from graphcomp.runtime.program.inputs import MicrobatchInputs
from graphcomp.runtime.ranks.layout import Layout
from graphcomp.runtime.results.prologue import Counts, count, never_zero


class Counting:
    """Counts over the microbatches of this process and, with a group over data ranks, over theirs."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self._callables: dict[int, tuple[Program, Any]] = {}

    def count(
        self, microbatches: Sequence[MicrobatchInputs], cuts: Sequence[Partitioned], total: Contribution
    ) -> tuple[Counts, int]:
        """The counts, and how many collectives it took. total: what all data ranks report."""
        counted = []
        with as_written():  # once for all
            for number, (one, cut) in enumerate(zip(microbatches, cuts, strict=True)):
                try:
                    counted.append(self._prologue(one, cut))
                except BaseException as error:
                    error.add_note(f"in microbatch {number}")
                    raise
        used = 0

        def reduce(vector: torch.Tensor) -> torch.Tensor:
            nonlocal used
            if self.layout.data is None:
                return vector
            used += 1
            return WAIT(ALL_REDUCE(vector, "sum", self.layout.data.group_name))

        return count(total.losses, counted, self.layout.device, total.floating, reduce), used

    def replaced(self, counts: Counts, tokens: Mapping[str, torch.Tensor]) -> Counts:
        """The counts with the denominators that the caller gives: 0-dim, floats only where floats are counted."""
        found = dict(counts.tokens)
        for name, given in tokens.items():
            found[name] = given.to(self.layout.device, found[name].dtype)
        return Counts(found, {name: never_zero(value) for name, value in found.items()})

    def _prologue(self, one: MicrobatchInputs, cut: Partitioned) -> dict[str, torch.Tensor]:
        if cut.prologue is None:
            return {}
        program = cut.prologue
        known, call = self._callables.get(id(program), (None, None))
        if call is None or known is not program:
            call = boxed_callable(program)
            self._callables[id(program)] = program, call
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
