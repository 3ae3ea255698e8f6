"""A survey: can a model be captured and cut as it is, what would its stages send, and is the result eager's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from graphcomp.ir import signature as role
from graphcomp.ir.program import Program
from graphcomp.ir.spelling import Symbols
from graphcomp.partition import Partitioned
from graphcomp.plan import Plan
from graphcomp.testing.captures import SharedCaptures
from graphcomp.testing.parity import check_parity
from graphcomp.testing.virtual import VirtualStep


@dataclass(frozen=True)
class Crossing:
    """What one stage sends to a neighbour, for each microbatch.

    stages: of how many. target < source: gradients. values: as `name: dtype[shape]`, over the microbatch's sizes.
    """

    stages: int
    source: int
    target: int
    values: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.stages} stages, {self.source}>{self.target}: {', '.join(self.values)}"


@dataclass(frozen=True)
class Survey:
    """What became of one model.

    nodes: operations of the first microbatch's joint program. stages: the numbers of stages at which loss, metrics,
        gradients and buffers were eager's. crossings: at each of these. error: the largest relative difference of all.
    tied: whether parameters with several names stayed one, with one gradient; None: the model has none.
    captures: how many the microbatches needed. seconds: what these took.
    refused: the first reason why a number of stages is missing: the stages, the type of the error and its first line.
    """

    name: str
    nodes: int
    stages: tuple[int, ...]
    crossings: tuple[Crossing, ...]
    error: float
    tied: bool | None
    captures: int
    seconds: float
    refused: str | None

    @property
    def passed(self) -> bool:
        return self.refused is None and self.tied is not False

    def __str__(self) -> str:
        tied = {None: "no tied weights", True: "tied weights kept", False: "TIED WEIGHTS LOST"}[self.tied]
        held = ", ".join(map(str, self.stages)) or "no"
        captures = f"{self.captures} capture{'s' * (self.captures != 1)} in {self.seconds:.1f} s"
        lines = [
            f"{self.name}: {self.nodes} nodes, {captures}, {tied}",
            f"  equal to eager at {held} stages, largest relative difference {self.error:.1e}",
            *(f"  {crossing}" for crossing in self.crossings),
        ]
        return "\n".join(lines + ([f"  refused at {self.refused}"] if self.refused else []))


def survey(
    model: nn.Module,
    loss_fn: Callable[[Any, Any], Any] | None,
    microbatches: Sequence[Any],
    stages: Sequence[int] = (1, 2, 4),
    *,
    name: str | None = None,
) -> Survey:
    """Try a model as it is: capture it, cut it, run all its stages in this process, and compare with eager PyTorch.

    model, loss_fn, microbatches: as `compile_train_step` and a step take them. name: None: the class of the model.
    Each number of stages is compared as by `check_parity`, with the eager backend. Nothing is raised: a refusal, or a
    difference, is in the result. The model is left as it was.
    """
    trace, names = SharedCaptures(), _shared_names(model)
    equal: list[int] = []
    crossings: list[Crossing] = []
    error, nodes, tied, refused = 0.0, 0, None if not names else True, None
    for count in stages:
        try:
            plan = Plan(stages=count, backend="eager", max_programs=max(len(microbatches), 1), quiet=True)
            step = VirtualStep(model, loss_fn, plan=plan, trace=trace)
            table = check_parity(model, loss_fn, microbatches, step=step)
        except Exception as problem:
            first = (str(problem).splitlines() or [""])[0]
            refused = refused or f"{count} stage{'s' * (count > 1)}: {type(problem).__name__}: {first}"
            continue
        used = step.latest[0].specialisation
        equal.append(count)
        error = max([error, *(row.relative for row in table)])
        nodes = nodes or len(used.joint.program.calls())
        crossings += _crossings(used.partitions[False], count)
        if names and not (_is_one(used.joint.program, names) and _shared_names(model) == names):
            tied = False
    return Survey(
        name or type(model).__name__,
        nodes,
        tuple(equal),
        tuple(crossings),
        error,
        tied,
        trace.number,
        trace.seconds,
        refused,
    )


def _shared_names(model: nn.Module) -> list[list[str]]:
    """The names of each parameter that has several."""
    found: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found.setdefault(id(parameter), []).append(name)
    return [names for names in found.values() if len(names) > 1]


def _is_one(program: Program, shared: Sequence[Sequence[str]]) -> bool:
    """Whether of the names of each parameter at most one is an input, and at most one has a gradient."""
    inputs = [what.name for what in program.inputs if isinstance(what, role.Param)]
    outputs = [what.name for what in program.outputs if isinstance(what, role.Grad)]
    return all(sum(name in names for name in found) <= 1 for names in shared for found in (inputs, outputs))


def _crossings(cut: Partitioned, stages: int) -> list[Crossing]:
    symbols = Symbols(cut.joint.program)
    return [
        Crossing(stages, one.source, one.target, tuple(value.text(symbols) for value in one.values))
        for one in (*cut.forward_boundaries.values(), *cut.backward_boundaries.values())
    ]
