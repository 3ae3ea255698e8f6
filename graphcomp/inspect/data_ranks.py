"""The part of a plan's text about data ranks: what is gathered and reduced in a step, and with how many collectives."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from graphcomp.compat import collective_operators as ops
from graphcomp.compat.operators import OpOverload
from graphcomp.dataparallel.spec import Spec
from graphcomp.dataparallel.step import DataParallel
from graphcomp.inspect.table import columns, count, size
from graphcomp.ir.program import Program
from graphcomp.schedule import Schedule

_NAMES = {ops.ALL_GATHER: "all_gather", ops.ALL_REDUCE: "all_reduce", ops.REDUCE_SCATTER: "reduce_scatter"}


def data_ranks(data: DataParallel, schedule: Schedule) -> Iterator[str]:
    """What the plan does, in one line; then one for each stage, step program and kind of collective."""
    when = "for every action" if data.regather else "once a step"
    how = f"sharded, gathered {when}" if data.sharded else "replicated"
    yield f"  {data.ranks}, parameters {how}, collectives of up to {size(data.bucket_bytes)}"
    rows: list[tuple[object, ...]] = []
    for stage in range(schedule.stages):
        found = list(_rows(data, stage, _actions(schedule, stage) if data.regather else 1))
        rows += [(f"stage {stage}" if place == 0 else "", *row) for place, row in enumerate(found)]
    head = ("", "program", "collective", "tensors", "elements", "bytes", "calls", "times a step")
    yield from columns([head, *rows], right=range(3, 8)) if rows else ["  nothing is gathered or reduced"]


def bytes_of(specs: Iterable[Spec]) -> int:
    return sum(spec.numel * spec.dtype.itemsize for spec in specs)


def _actions(schedule: Schedule, stage: int) -> int:
    """How many computations a stage has in a step."""
    return sum(one.stage == stage and not one.kind.is_transfer for actions in schedule.ranks for one in actions)


def _rows(data: DataParallel, stage: int, gathers: int) -> Iterator[tuple[object, ...]]:
    unshard, reduce = data.unshard_program(stage), data.reduce_program(stage)
    if unshard is not None:
        gathered = [data.specs[name] for name in data.gathered_on(stage)]
        yield "unshard", *_calls(unshard, ops.ALL_GATHER, gathered), gathers
    if reduce is not None:
        gradients = [data.gradient(name) for name in data.reduced_on(stage)]
        whole = [spec for spec in gradients if spec.name not in data.sharded]
        rows = [spec for spec in gradients if spec.name in data.sharded]
        for operator, specs in ((ops.ALL_REDUCE, whole), (ops.REDUCE_SCATTER, rows)):
            if specs:
                yield "reduce", *_calls(reduce, operator, specs), 1
    buffers = [data.buffers[name] for name in data.updated_on(stage)]
    if buffers:
        yield "update", "broadcast", *_amount(buffers), len(data.turns_on(stage)), 1


def _calls(program: Program, operator: OpOverload, specs: list[Spec]) -> tuple[object, ...]:
    calls = sum(node.target is operator for node in program.calls())
    return _NAMES[operator], *_amount(specs), calls


def _amount(specs: list[Spec]) -> tuple[object, ...]:
    return len(specs), count(sum(spec.numel for spec in specs)), size(bytes_of(specs))
