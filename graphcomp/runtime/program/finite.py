"""Looks for values that are not finite: at each stage and microbatch, read back once, before a step writes anything."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from graphcomp.compat.norms import largest_of_each
from graphcomp.errors import NonFiniteError
from graphcomp.ir.signature import Activation, Grad, Loss, Role
from graphcomp.partition.stages import Partitioned
from graphcomp.runtime.program.instructions import RankProgram, Run
from graphcomp.runtime.program.link import Operation, State


@dataclass(frozen=True, order=True)
class Place:
    """Where a value was found. Places are ordered as data flows: microbatch by microbatch, each down the stages and up
    again; behind all of them, the sums that a step ends with.

    microbatch: infinity for such a sum. part: 0 forward, 1 loss, 2 backward. depth: the stage, negated on the way up.
    """

    microbatch: float
    part: int
    depth: int
    data_rank: int
    what: str

    def __str__(self) -> str:
        stage = f"stage {abs(self.depth)} of data rank {self.data_rank}"
        if math.isinf(self.microbatch):
            return f"{stage}, behind the last microbatch"
        return f"{stage}, microbatch {int(self.microbatch)}, {'backward' if self.part == 2 else 'forward'}"


class FiniteWatch:
    """The largest magnitude of all losses, boundary values and gradients that a rank computes in a step.

    It is nan or infinite if one of the elements is. A gradient is seen as it accumulates, so the first microbatch after
    which it is not finite is the one that made it so.
    """

    def __init__(self, program: RankProgram, specialisations: Sequence[Partitioned]) -> None:
        self._program, self._specialisations = program, specialisations
        self._seen: list[tuple[tuple[float, int, int, str], torch.Tensor]] = []

    def clear(self) -> None:
        self._seen = []

    def wrapped(self, run: Run, operation: Operation) -> Operation:
        """The operation of a run, after which its results are looked at."""
        stage = getattr(self._specialisations[run.specialisation].stages[run.stage], run.kind)
        named = zip(stage.outputs, run.results, strict=True)
        results = [
            (_key(what, run), register)
            for what, register in named
            if isinstance(what, Activation | Loss) and register is not None
        ]
        sums = [(_key(Grad(self._program.gradients[slot][1]), run), slot) for slot in run.gradients]

        def watched(state: State) -> object:
            waits = operation(state)
            found = [(key, state.registers[register]) for key, register in results]
            self._see([*found, *((key, state.gradients[slot]) for key, slot in sums)])
            return waits

        return watched

    def ending(self, stage: int, gradients: Mapping[str, torch.Tensor]) -> None:
        """Look at what a stage's gradients have come to at the end, over all data ranks."""
        self._see([((math.inf, 2, -stage, str(Grad(name))), value) for name, value in gradients.items()])

    def first(self, data_rank: int) -> Place | None:
        """The first place that holds nan or infinity, if any does. Reads back from the device, once."""
        if not self._seen:
            return None
        finite = torch.stack([largest.double() for _, largest in self._seen]).isfinite().tolist()
        bad = [key for (key, _), good in zip(self._seen, finite, strict=True) if not good]
        return min((Place(*key[:3], data_rank, key[3]) for key in bad), default=None)

    def _see(self, found: Sequence[tuple[tuple[float, int, int, str], Any]]) -> None:
        kept = [(k, v) for k, v in found if isinstance(v, torch.Tensor) and _can_fail(v) and v.numel()]
        self._seen += zip([key for key, _ in kept], largest_of_each([value for _, value in kept]), strict=True)


def _can_fail(value: torch.Tensor) -> bool:
    return value.is_floating_point() or value.is_complex()


def _key(what: Role, run: Run) -> tuple[float, int, int, str]:
    match what:
        case Loss():
            return run.microbatch, 1, run.stage, str(what)
        case Activation(source, target) if source < target:
            return run.microbatch, 0, run.stage, str(what)
        case _:
            return run.microbatch, 2, -run.stage, str(what)


def not_finite(places: Iterable[Place | None], step: int) -> NonFiniteError | None:
    """The error that names the first of these places; None if there is none."""
    first = min((place for place in places if place is not None), default=None)
    if first is None:
        return None
    return NonFiniteError(
        f"step {step} yields a value that is not finite",
        where=str(first),
        expected="finite losses, boundary values and gradients, as the plan has check_finite=True",
        got=f"nan or infinity in '{first.what}'",
        do="gradients and buffers are as before the step: skip it, or stop here and look at its microbatch",
    )
