"""The plan as text: what each stage holds, what crosses each cut, what the schedule is predicted to cost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch.fx import Node

from graphcomp import schedule as schedules
from graphcomp.compat.estimates import hint
from graphcomp.dataparallel.step import DataParallel
from graphcomp.inspect.axes import axes
from graphcomp.inspect.data_ranks import bytes_of, data_ranks
from graphcomp.inspect.reads import reads
from graphcomp.inspect.table import columns, count, ranges, shorten, size, wrapped
from graphcomp.ir import meta, spelling
from graphcomp.ir import signature as role
from graphcomp.ir.program import Program
from graphcomp.partition.costs import flops, size_bytes
from graphcomp.partition.stages import Boundary, Partitioned, Stage
from graphcomp.plan import Plan
from graphcomp.schedule import Cost, Kind, Schedule


def explain(partitioned: Partitioned, plan: Plan, schedule: Schedule, data: DataParallel | None = None) -> str:
    """The plan of a step as text: the same on every run, and on every rank that has microbatches of the same number and
    kinds and the same example.

    schedule: with its transfers, as `GraphCompiler.schedule` makes it. data: what the step does over data ranks, if
    there are several. All numbers are estimates at the sizes of the example microbatch; none is measured. At most 110
    columns wide.
    """
    return "\n".join(_lines(partitioned, plan, schedule, data)) + "\n"


def _lines(cut: Partitioned, plan: Plan, schedule: Schedule, data: DataParallel | None) -> Iterator[str]:
    symbols = spelling.Symbols(cut.joint.program)
    stages = [_StageFacts(stage, plan, data) for stage in cut.stages]
    parameters = plan.parameters if data is not None or plan.parameters == "replicate" else "whole (one data rank)"
    on = f" on {len(schedule.ranks)} rank{'s' * (len(schedule.ranks) > 1)}" if len(schedule.ranks) < len(stages) else ""
    head = f"plan: {len(stages)} stage{'s' * (len(stages) > 1)}{on}, schedule {plan.schedule}, parameters {parameters}"
    yield f"{head}, backend {plan.backend}"
    yield "estimates at the sizes of the example microbatch"
    if plan.mesh is not None:
        yield from ("", "axes")
        yield from axes(plan, cut)
    yield from ("", "stages")
    total = sum(facts.flops for facts in stages) or 1
    rows: list[tuple[object, ...]] = [("", "parameters", "bytes", "FLOPs", "share", "saved", "bytes")]
    rows += [facts.row(total) for facts in stages]
    yield from columns(rows, right=range(1, 7))
    for facts in stages:
        yield from facts.describe()
    yield from ("", "cuts")
    yield from _cuts(cut, symbols)
    yield from ("", "shared parameters")
    shared = [(name, where) for name, where in cut.parameter_stages.items() if len(where) > 1]
    yield from columns([(name, f"stages {_numbers(where)}") for name, where in shared]) or ["  none"]
    if data is not None:
        yield from ("", "data ranks")
        yield from data_ranks(data, schedule)
    yield from ("", "results")
    yield from columns(list(_results(cut)))
    if plan.loss_chunks > 1:
        yield shorten(f"  {_chunks(cut, plan, symbols)}")
    yield from ("", "schedule")
    yield from (shorten(f"  {line}") for line in _computations(schedule).text().splitlines())
    yield from ("", "predicted")
    yield from _predicted(stages, schedule, data)
    yield from ("", "sizes")
    example = dict(_example(cut))
    for symbol, (path, dimension) in cut.joint.sizes.symbols.items():
        shown = f", {example[symbol]} in the example" if symbol in example else ""
        yield shorten(f"  {symbols.rename(symbol)} = {path}.shape[{dimension}]{shown}")
    if not cut.joint.sizes.symbols:
        yield "  all fixed"
    yield from reads(cut, symbols)
    conditions = [cut.joint.sizes.readable(condition) for condition in cut.joint.sizes.conditions]
    yield from (shorten(f"  if {condition}") for condition in sorted(conditions))


class _StageFacts:
    """The numbers of one stage. held: bytes of each parameter between steps. gathered: of whole ones, within a step."""

    def __init__(self, stage: Stage, plan: Plan, data: DataParallel | None) -> None:
        self.stage = stage
        inputs = {what: node for program in stage.programs for what, node in program.input_nodes()}
        weights = {what.name: node for what, node in inputs.items() if isinstance(what, role.Param)}
        self.parameters = sum(_elements(node) for node in weights.values())
        self.parameter_bytes = sum(size_bytes(node) for node in weights.values())
        sharded = {} if data is None else {name: of for name, of in data.sharded.items() if name in weights}
        gathered = () if data is None else data.gathered_on(stage.index)
        self.gathered_bytes = bytes_of(sharded[name].spec for name in gathered if name in sharded)
        rows = {name: bytes_of([replace(of.spec, shape=of.padded)]) for name, of in sharded.items()}
        self.held = {name: size_bytes(node) for name, node in weights.items()} | rows
        trained = {what.name for program in stage.programs for what in program.outputs if isinstance(what, role.Grad)}
        if data is not None:  # other data ranks may have gradients that no microbatch here has
            trained |= weights.keys() & set(data.reduced_on(stage.index))
        itemsize = None if plan.accumulate_dtype is None else plan.accumulate_dtype.itemsize
        self.gradient_bytes = sum(_size(weights[name], itemsize) for name in sorted(trained))
        self.forward_flops = _work(stage.forward)
        self.backward_flops = _work(stage.backward) if stage.backward is not None else 0
        self.flops = self.forward_flops + self.backward_flops
        saved = [node for what, node in stage.forward.output_items() if isinstance(what, role.Saved)]
        self.saved, self.saved_bytes = len(saved), sum(size_bytes(node) for node in saved)
        self.fields = [what.path for what in inputs if isinstance(what, role.BatchLeaf)]
        self.buffers = [what.name for what in inputs if isinstance(what, role.Buffer)]
        results = (what for program in stage.programs for what in program.outputs)
        self.updates = {what.name for what in results if isinstance(what, role.BufferUpdate)}

    def row(self, total: int) -> tuple[object, ...]:
        share = f"{100 * self.flops / total:.1f} %"
        numbers = count(self.parameters), size(self.parameter_bytes), count(self.flops), share
        return f"stage {self.stage.index}", *numbers, self.saved, size(self.saved_bytes)

    def describe(self) -> Iterator[str]:
        yield f"  stage {self.stage.index}"
        yield from wrapped("modules  ", ranges(_modules(self.stage.forward)), indent=4)
        if self.fields:
            yield from wrapped("batch    ", sorted(self.fields), indent=4)
        if self.buffers:
            named = [f"{name} (updated)" if name in self.updates else name for name in sorted(self.buffers)]
            yield from wrapped("buffers  ", named, indent=4)
        if self.stage.backward is None:
            yield "    no backward: nothing here or before is trained"


def _computations(schedule: Schedule) -> Schedule:
    """The schedule without its transfers, which say nothing that the cuts do not."""
    ranks = (tuple(action for action in actions if not action.kind.is_transfer) for actions in schedule.ranks)
    return replace(schedule, ranks=tuple(ranks), forward_edges=None, backward_edges=None)


def _modules(program: Program) -> list[str]:
    """The modules that run in a program, in order, as few names as tell which: a module in whole goes by its name.

    Names are cut after the first number (`h.3.mlp.fc` -> `h.3`), as blocks are what a reader looks for.
    """
    found: dict[str, None] = {}
    for node in program.calls():
        name = meta.note(node).module
        computes_size = isinstance(meta.value(node), torch.SymInt | int)  # which every stage does for itself
        if name and not computes_size:
            parts = name.split(".")
            stop = next((i + 1 for i, part in enumerate(parts) if part.isdecimal()), 1)
            found[".".join(parts[:stop])] = None
    return list(found)


def _cuts(cut: Partitioned, symbols: spelling.Symbols) -> Iterator[str]:
    rows: list[tuple[object, ...]] = []
    nodes = {node.name: node for stage in cut.stages for p in stage.programs for node in p.graph.nodes}
    for table, word in ((cut.forward_boundaries, "activation"), (cut.backward_boundaries, "gradient")):
        for _, boundary in sorted(table.items(), key=lambda item: min(item[1].source, item[1].target)):
            rows += _crossing(boundary, word, nodes, symbols)
    rows.sort(key=lambda row: str(row[0]))
    yield from columns([row[1:] for row in rows], right=[4]) or ["  none"]


def _crossing(
    boundary: Boundary, word: str, nodes: dict[str, Node], symbols: spelling.Symbols
) -> Iterator[tuple[object, ...]]:
    low = min(boundary.source, boundary.target)
    key = f"{low:06}{boundary.source > boundary.target}"
    for index, value in enumerate(boundary.values):
        where = f"{boundary.source} > {boundary.target}"
        shape = spelling.dtype(value.dtype) + symbols.sizes(value.shape)
        yield f"{key}{index:06}", where, word, value.name, shape, size(size_bytes(nodes[value.name]))


def _results(cut: Partitioned) -> Iterator[tuple[object, ...]]:
    owners = {what: stage.index for stage in cut.stages for what in stage.forward.outputs}
    for loss in cut.joint.losses:
        divided = "by its tokens" if loss.kind == "token" else "over microbatches"
        yield f"loss {loss.name}", f"{loss.kind}, averaged {divided}", f"stage {owners[role.Loss(loss.name)]}"
    for metric in cut.joint.metrics:
        yield f"metric {metric.name}", metric.reduction, f"stage {owners[role.Metric(metric.name)]}"


def _chunks(cut: Partitioned, plan: Plan, symbols: spelling.Symbols) -> str:
    chunks = cut.joint.chunks
    if chunks is None:
        return f"head and loss in one piece: the example has fewer than {2 * plan.loss_chunks} rows"
    return f"head '{chunks.head}' and loss in {chunks.count} chunks of {symbols.text(chunks.rows)} rows"


def _example(cut: Partitioned) -> Iterator[tuple[str, int]]:
    """What the sizes were in the microbatch that the joint program was captured from."""
    inputs = dict(cut.joint.program.input_nodes())
    for symbol, (path, dimension) in cut.joint.sizes.symbols.items():
        leaf = inputs.get(role.BatchLeaf(path))
        tensor = None if leaf is None else meta.tensor(leaf)
        if tensor is not None:
            yield symbol, hint(tensor.shape[dimension])
        elif role.Size(symbol) in inputs:
            yield symbol, hint(meta.value(inputs[role.Size(symbol)]))


def _predicted(stages: list[_StageFacts], schedule: Schedule, data: DataParallel | None) -> Iterator[str]:
    """Bubble and memory of every rank when a FLOP takes the same time everywhere and communication takes none."""
    seconds: dict[tuple[int, Kind], float] = {}
    for facts in stages:
        seconds[facts.stage.index, Kind.F] = float(facts.forward_flops)
        seconds[facts.stage.index, Kind.B] = float(facts.backward_flops)
    kept = {facts.stage.index: facts.saved_bytes for facts in stages}
    found = schedules.simulate(schedule, Cost(seconds, kept_bytes=kept))
    shards = data is not None and bool(data.sharded)
    names = ("parameters", *(("gathered",) if shards else ()), "gradients", "saved", "peak memory")
    rows: list[tuple[object, ...]] = [("", "bubble", "in flight", *names)]
    for rank, times in enumerate(found.ranks):
        own = [facts for facts in stages if schedule.rank_of(facts.stage.index) == rank]
        each = {name: held for facts in own for name, held in facts.held.items()}  # also if two stages share it
        held, gathered = sum(each.values()), sum(f.gathered_bytes for f in own)
        parts = [held, *([gathered] if shards else []), sum(f.gradient_bytes for f in own), times.peak_bytes]
        numbers = map(size, (*parts, sum(parts)))
        rows.append((f"rank {rank}", f"{100 * times.bubble:.1f} %", times.peak_in_flight, *numbers))
    yield from columns(rows, right=range(1, len(rows[0])))


def _work(program: Program) -> int:
    return sum(flops(node) for node in program.calls())


def _elements(node: Node) -> int:
    value = meta.tensor(node)
    return 0 if value is None else value.numel()


def _size(node: Node, itemsize: int | None) -> int:
    """Bytes of a parameter's gradient, of this element size (None: the parameter's own)."""
    return size_bytes(node) if itemsize is None else _elements(node) * itemsize


def _numbers(stages: tuple[int, ...]) -> str:
    return ", ".join(map(str, stages))
