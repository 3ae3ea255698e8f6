"""The part of a plan's text about its mesh: what each axis is for, and which collectives of the model run along it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from graphcomp.inspect.table import columns
from graphcomp.ir.collective_calls import axis_of, is_start
from graphcomp.partition.stages import Partitioned
from graphcomp.plan import Plan

_MEANING = {
    "pp": "pipeline stages",
    "dp": "data ranks, each with microbatches of its own",
    "cp": "data ranks too, each with its part of the same sequences",
    "tp": "tensor ranks: the same microbatches, parts of the parameters",
}


def axes(plan: Plan, cut: Partitioned) -> Iterator[str]:
    """One line for each axis that is larger than 1; then the collectives of other groups, if the model uses any."""
    calls = [node for stage in cut.stages for program in stage.programs for node in program.calls()]
    counts = Counter(axis_of(node) for node in calls if is_start(node))
    every = (plan.mesh.mesh_dim_names if plan.mesh is not None else None) or ()
    names = [name for name in every if plan.axis(name) > 1]
    rows: list[tuple[object, ...]] = [("", "ranks", "collectives", "what they are")]
    rows += [(name, plan.axis(name), counts.pop(name, 0), _MEANING[name]) for name in names]
    rows += [(str(name), "", number, "a group of the model's own") for name, number in sorted(counts.items(), key=str)]
    yield from columns(rows, right=[1, 2])
