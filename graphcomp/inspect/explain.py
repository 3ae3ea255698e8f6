"""The plan as text: what each stage holds, what crosses each cut, what the schedule is predicted to cost."""

from __future__ import annotations

from collections.abc import Iterator

from torch.fx import Node

from graphcomp import schedule as schedules
from graphcomp.inspect.table import columns, count, ranges, shorten, size, wrapped
from graphcomp.ir import meta, spelling
from graphcomp.ir import signature as role
from graphcomp.ir.program import Program
from graphcomp.partition.costs import flops, size_bytes
from graphcomp.partition.stages import Boundary, Partitioned, Stage
from graphcomp.plan import Plan
from graphcomp.schedule import Cost, Kind, Schedule


def explain(partitioned: Partitioned, plan: Plan, microbatches: int = 4) -> str:
    """The plan of a step of `microbatches` microbatches as text, the same on every run and every rank.

    All numbers are estimates at the sizes of the example microbatch; none is measured. At most 110 columns wide.
    """
    return "\n".join(_lines(partitioned, plan, microbatches)) + "\n"


def _lines(cut: Partitioned, plan: Plan, microbatches: int) -> Iterator[str]:
    symbols = spelling.Symbols(cut.joint.program)
    stages = [_StageFacts(stage, cut) for stage in cut.stages]
    schedule = build_schedule(cut, plan.schedule, microbatches)
    head = f"plan: {len(stages)} stage{'s' * (len(stages) > 1)}, schedule {plan.schedule}, parameters {plan.parameters}"
    yield f"{head}, backend {plan.backend}"
    yield "estimates at the sizes of the example microbatch"
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
    yield from ("", "results")
    yield from columns(list(_results(cut)))
    yield from ("", "schedule")
    yield from (shorten(f"  {line}") for line in schedule.text().splitlines())
    yield from ("", "predicted")
    yield from _predicted(stages, schedule)
    yield from ("", "sizes")
    for symbol, (path, dimension) in cut.joint.sizes.symbols.items():
        yield shorten(f"  {symbols.rename(symbol)} = {path}.shape[{dimension}]")
    if not cut.joint.sizes.symbols:
        yield "  all fixed"
    conditions = [cut.joint.sizes.readable(condition) for condition in cut.joint.sizes.conditions]
    yield from (shorten(f"  if {condition}") for condition in sorted(conditions))


class _StageFacts:
    """The numbers of one stage."""

    def __init__(self, stage: Stage, cut: Partitioned) -> None:
        self.stage = stage
        programs = [stage.forward, *([stage.backward] if stage.backward is not None else [])]
        inputs = {what: node for program in programs for what, node in program.input_nodes()}
        weights = {what: node for what, node in inputs.items() if isinstance(what, role.Param)}
        self.parameters = sum(_elements(node) for node in weights.values())
        self.parameter_bytes = sum(size_bytes(node) for node in weights.values())
        trained = {what.name for program in programs for what in program.outputs if isinstance(what, role.Grad)}
        self.gradient_bytes = sum(size_bytes(node) for what, node in weights.items() if what.name in trained)
        self.forward_flops = _work(stage.forward)
        self.backward_flops = _work(stage.backward) if stage.backward is not None else 0
        self.flops = self.forward_flops + self.backward_flops
        saved = [node for what, node in stage.forward.output_items() if isinstance(what, role.Saved)]
        self.saved, self.saved_bytes = len(saved), sum(size_bytes(node) for node in saved)
        self.fields = [what.path for what in inputs if isinstance(what, role.BatchLeaf)]
        self.buffers = [what.name for what in inputs if isinstance(what, role.Buffer)]
        self.updates = {what.name for what in stage.forward.outputs if isinstance(what, role.BufferUpdate)}

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


def build_schedule(cut: Partitioned, name: str, microbatches: int) -> Schedule:
    """The schedule of the stages' computations, without messages: stages with nothing to train have no backward."""
    idle = [stage.index for stage in cut.stages if stage.backward is None]
    built = schedules.get(name).build(len(cut.stages), microbatches)
    return schedules.fuse(schedules.without_backward(built, idle) if idle else built)


def _modules(program: Program) -> list[str]:
    """The modules that run in a program, in order, as few names as tell which: a module in whole goes by its name.

    Names are cut after the first number (`h.3.mlp.fc` -> `h.3`), as blocks are what a reader looks for.
    """
    found: dict[str, None] = {}
    for node in program.calls():
        name = meta.note(node).module
        if name:
            parts = name.split(".")
            stop = next((i + 1 for i, part in enumerate(parts) if part.isdecimal()), 1)
            found[".".join(parts[:stop])] = None
    return list(found)


def _cuts(cut: Partitioned, symbols: spelling.Symbols) -> Iterator[str]:
    rows: list[tuple[object, ...]] = []
    nodes = {node.name: node for stage in cut.stages for p in _programs(stage) for node in p.graph.nodes}
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


def _predicted(stages: list[_StageFacts], schedule: Schedule) -> Iterator[str]:
    """Bubble and memory of every rank when a FLOP takes the same time everywhere and messages take none."""
    seconds: dict[tuple[int, Kind], float] = {}
    for facts in stages:
        seconds[facts.stage.index, Kind.F] = float(facts.forward_flops)
        seconds[facts.stage.index, Kind.B] = float(facts.backward_flops)
    kept = {facts.stage.index: facts.saved_bytes for facts in stages}
    found = schedules.simulate(schedule, Cost(seconds, kept_bytes=kept))
    rows: list[tuple[object, ...]] = [("", "bubble", "in flight", "parameters", "gradients", "saved", "peak memory")]
    for rank, times in enumerate(found.ranks):
        held = [facts for facts in stages if schedule.rank_of(facts.stage.index) == rank]
        parameters, gradients = sum(f.parameter_bytes for f in held), sum(f.gradient_bytes for f in held)
        memory = parameters + gradients + times.peak_bytes
        sizes = map(size, (parameters, gradients, times.peak_bytes, memory))
        rows.append((f"rank {rank}", f"{100 * times.bubble:.1f} %", times.peak_in_flight, *sizes))
    yield from columns(rows, right=range(1, 7))


def _programs(stage: Stage) -> list[Program]:
    return [stage.forward, *([stage.backward] if stage.backward is not None else [])]


def _work(program: Program) -> int:
    return sum(flops(node) for node in program.calls())


def _elements(node: Node) -> int:
    value = meta.tensor(node)
    return 0 if value is None else value.numel()


def _numbers(stages: tuple[int, ...]) -> str:
    return ", ".join(map(str, stages))
