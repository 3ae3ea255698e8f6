"""Partition: cut the joint graph, never the module, into stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch.fx import Node

from graphcomp.capture.joint import Joint
from graphcomp.compat.symbols import expression
from graphcomp.errors import PartitionError
from graphcomp.ir import meta
from graphcomp.ir import signature as role
from graphcomp.ir.calls import upstream
from graphcomp.ir.effects import is_check, is_collective, is_read_number
from graphcomp.ir.program import Program
from graphcomp.ir.randomness import draws
from graphcomp.ir.relations import is_checked
from graphcomp.ir.signature import Role
from graphcomp.partition.balance import balanced_cuts
from graphcomp.partition.chunks import check_chunks
from graphcomp.partition.cuts import named_cuts, owned_forward
from graphcomp.partition.extract import extract
from graphcomp.partition.homes import Homes, homes_of, kept_cuts, require_homes, require_one_home
from graphcomp.partition.layouts import arrive_dense, turn_crossing
from graphcomp.partition.place import Slot, place, split_gradient_sums
from graphcomp.partition.prologue import build_prologue
from graphcomp.partition.recompute import recompute_regions
from graphcomp.partition.remat import without_recomputable
from graphcomp.partition.routes import Routes, needs, route
from graphcomp.partition.run_time_sizes import check_cuts, crossing_error, has_run_time_size, shown
from graphcomp.partition.stages import Boundary, Carried, Partitioned, Stage
from graphcomp.partition.traits import is_alias, order_of, replicable_nodes
from graphcomp.partition.updates import Update, lift_updates

Result = tuple[Role, Node | None]


def partition(
    joint: Joint,
    stages: int = 1,
    split: Sequence[str] | None = None,
    *,
    outputs: bool = True,
    homes: Homes | None = None,
    in_turn: bool = False,
) -> Partitioned:
    """Cut a joint program into stages.

    split: the modules that begin stages 1, 2, ...; None: a balanced cut into `stages`.
    outputs: whether the model's own outputs are among the results of the stages.
    homes: the stages that hold each parameter and buffer since an earlier cut; this one leaves them there.
    in_turn: several data ranks change the same buffers, so that updates are programs of their own; an evaluation, which
        changes nothing, has none.

    Raises PartitionError, StateError or LossError, naming what does not fit.
    """
    original, joint = joint, replace(joint, program=joint.program.copy())  # split sums add nodes
    program = joint.program
    replicable = replicable_nodes(program)
    forward = owned_forward(program, replicable)
    if split is not None:
        cuts = named_cuts(forward, split)
    elif homes:
        cuts = kept_cuts(program, forward, replicable, homes, stages)
    else:
        cuts = balanced_cuts(program, forward, replicable, stages)
    check_cuts(forward, cuts, split)
    slots = place(program, cuts, forward, replicable)
    check_chunks(forward, cuts, slots)
    updates = lift_updates(program, slots, replicable, len(cuts), outputs) if in_turn else None
    if updates and not joint.is_training:
        updates = {}
    recompute_regions(program, slots, replicable)
    cut = _Cutter(joint, len(cuts) + 1, replicable, slots, outputs, updates).cut()
    if homes:
        require_homes(homes_of(cut.stages), homes)
        if joint.is_training:
            require_one_home(cut.stages, homes)
    held = {name: homes[name] for name in cut.parameter_stages if name in homes} if homes else {}
    return replace(cut, joint=original, parameter_stages={**cut.parameter_stages, **held})


@dataclass
class _Cutter:
    joint: Joint
    stages: int
    replicable: set[Node]
    slots: dict[Node, Slot]
    outputs: bool
    updates: Mapping[int, Update] | None

    def __post_init__(self) -> None:
        self.program: Program = self.joint.program
        self.members: dict[Slot, list[Node]] = {}
        self.results: dict[Slot, list[Result]] = {}
        self.terms = split_gradient_sums(self.program, self.slots)
        self.order = order_of(self.program.graph)

    def cut(self) -> Partitioned:
        self._assign_results()
        routes = self._route()
        crossing = {node for table in (routes.down, routes.up) for nodes in table.values() for node in nodes}
        self._check_run_time_sizes(routes)
        if turn_crossing(self.program, sorted(crossing, key=self.order.__getitem__), self.slots, self.replicable):
            self.order = order_of(self.program.graph)
            routes = self._route()
        stages = tuple(self._stage(index, routes) for index in range(self.stages))
        return Partitioned(
            joint=self.joint,
            prologue=build_prologue(self.joint),
            stages=stages,
            forward_boundaries={s: self._boundary(s, s + 1, nodes) for s, nodes in sorted(routes.down.items())},
            backward_boundaries={s: self._boundary(s, s - 1, nodes) for s, nodes in sorted(routes.up.items())},
            parameter_stages=self._parameter_stages(stages),
        )

    def _check_run_time_sizes(self, routes: Routes) -> None:
        """Sizes known at run time only do not leave their stage; neither does an output that has them."""
        for table, step in ((routes.down, 1), (routes.up, -1)):
            for stage, nodes in table.items():
                for node in (node for node in nodes if has_run_time_size(node) or is_read_number(node)):
                    raise crossing_error(node, f"stage {max(stage, stage + step)}")
        for what, node in self.program.output_items():
            if self.stages == 1 or not self.outputs:
                return
            if isinstance(what, role.Output) and node is not None and has_run_time_size(node):
                raise PartitionError(
                    f"'{what}' has a number of rows that is known at run time only, which other ranks cannot compute",
                    where=meta.note(node).source,
                    expected="outputs whose shapes follow from the batch",
                    do="return the rows after they were sent back, or reduce them",
                )

    def _assign_results(self) -> None:
        """Give each output of the joint program to the slot that computes it; replicable ones to the last stage."""
        last = self.stages - 1
        for what, node in self.program.output_items():
            if isinstance(what, role.Tokens) or (isinstance(what, role.Output) and not self.outputs):
                continue
            if isinstance(what, role.BufferUpdate) and self.updates is not None:
                continue
            backward = isinstance(what, role.Grad)
            if node is None:
                continue
            if isinstance(what, role.Grad) and what.name in self.terms:
                for stage, terms in self.terms[what.name].items():
                    self.results.setdefault(Slot(True, stage), []).append((what, self._sum(terms, node)))
            else:
                self.results.setdefault(self.slots.get(node, Slot(backward, last)), []).append((what, node))
        for stage, update in (self.updates or {}).items():
            read = [(role.Statistic(i), node) for i, node in enumerate(update.statistics)]
            self.results.setdefault(Slot(False, stage), []).extend(read)

    def _sum(self, terms: list[Node], like: Node) -> Node:
        """One stage's share of a gradient sum."""
        total = terms[0]
        for term in terms[1:]:
            with self.program.graph.inserting_after(max(total, term, key=self.order.__getitem__)):
                following = self.program.graph.call_function(like.target, (total, term))  # type: ignore[arg-type]
            meta.set_value(following, meta.value(total))
            meta.inherit(following, like)
            self.slots[following] = self.slots[term]
            self.order = order_of(self.program.graph)
            total = following
        return total

    def _live_members(self) -> set[Node]:
        """The owned nodes that some result needs; a sum that was split up, and dead code, are none."""
        wanted = [node for results in self.results.values() for _, node in results if node is not None]
        # A draw that nobody reads moves the random stream on all the same; a collective has to be issued by all ranks;
        # what code relies on is checked where it is read, and what a check is given where that is computed.
        effects = (draws, is_collective, is_checked, is_check)
        kept = (node for node in self.program.calls() if any(has_effect(node) for has_effect in effects))
        return {node for node in upstream([*wanted, *filter(self.slots.__contains__, kept)]) if node in self.slots}

    def _route(self) -> Routes:
        live = self._live_members()
        self.members = {}
        for node in self.program.calls():
            if node in live:
                self.members.setdefault(self.slots[node], []).append(node)
        targets: dict[Node, set[Slot]] = {}
        copied = {stage: self._copied(Slot(False, stage)) for stage in range(self.stages)}
        for slot, members in self.members.items():
            for node in members:
                for value in needs(node, slot, self.slots, self.replicable, copied[slot.stage]):
                    targets.setdefault(value, set()).add(slot)
        for slot, results in self.results.items():
            for what, result in results:
                if result is not None and result in self.replicable:
                    for value in needs(result, slot, self.slots, self.replicable, copied[slot.stage]):
                        targets.setdefault(value, set()).add(slot)
                elif isinstance(what, role.Statistic) and result is not None and self.slots.get(result, slot) != slot:
                    targets.setdefault(result, set()).add(slot)
        routes = Routes()
        for value, wanted in targets.items():
            if value in self.replicable:  # a stage keeps what its own forward computed
                for slot in wanted:
                    routes.saved.setdefault(slot.stage, []).append(value)
            else:
                route(value, self.slots[value], wanted, routes)
        numbers = [node for node in self.program.calls() if node in self.slots and is_read_number(node)]
        for stage, saved in routes.saved.items() if numbers else ():
            saved += shown(numbers, [*saved, *self.members.get(Slot(True, stage), [])], Slot(False, stage), self.slots)
        routes.sort(self.order)
        for stage, nodes in routes.saved.items():
            routes.saved[stage] = without_recomputable(nodes, stage, self.slots)
        return routes

    def _copied(self, slot: Slot) -> set[Node]:
        """The replicable nodes that the forward of a stage runs."""
        found: set[Node] = set()
        pending = [n for member in self.members.get(slot, []) for n in member.all_input_nodes]
        while pending:
            node = pending.pop()
            if node in self.replicable and node not in found:
                found.add(node)
                pending.extend(node.all_input_nodes)
        return found

    def _stage(self, index: int, routes: Routes) -> Stage:
        below, above = index - 1, index + 1
        forward, backward = Slot(False, index), Slot(True, index)
        arriving = _numbered(routes.down.get(below, []), below, index)
        leaving = _numbered(routes.down.get(index, []), index, above)
        saved: dict[Node, Role] = {node: role.Saved(i) for i, node in enumerate(routes.saved.get(index, []))}
        coming = _numbered(routes.up.get(above, []), above, index)
        going = _numbered(routes.up.get(index, []), index, below)
        has_backward = bool(self.results.get(backward) or going or self.members.get(backward))
        results = self.results.get(forward, [])
        gradients: list[Result] = [*((what, node) for node, what in going.items()), *self.results.get(backward, [])]
        of_forward: list[Result] = [(what, node) for node, what in leaving.items()]
        of_forward += [(what, node) for node, what in saved.items() if has_backward]
        run_forward = self.members.get(forward, [])
        run_backward = self.members.get(backward, [])
        first = self._extract(f"stage {index} forward", run_forward, arriving, [*of_forward, *results], [forward])
        second = None
        if has_backward:
            given = {**coming, **saved}
            kept = {what: meta.value(node) for what, node in first.output_items() if node is not None}
            second = self._extract(f"stage {index} backward", run_backward, given, gradients, [backward], kept)
        fused = first if second is None else None
        if second is not None and not coming and not leaving:
            fused = self._extract(
                f"stage {index} forward and backward",
                [*run_forward, *run_backward],
                arriving,
                [*results, *gradients],
                [forward, backward],
            )
        updates = (self.updates or {}).get(index)
        return Stage(index, first, second, fused, updates.program(self.program, index) if updates else None)

    def _extract(
        self,
        name: str,
        nodes: list[Node],
        given: dict[Node, Role],
        results: list[Result],
        slots: list[Slot],
        saved: Mapping[Role, object] | None = None,
    ) -> Program:
        stage = slots[0].stage

        def computes(node: Node) -> bool:
            if node in self.replicable or is_alias(node):
                return True
            own = self.slots[node]
            # Views of a saved base are shown again in backward.
            return own in slots or (own == Slot(False, stage) and slots[0].backward)

        return arrive_dense(extract(self.program, name, nodes, given, results, computes=computes), saved or {})

    def _boundary(self, source: int, target: int, nodes: list[Node]) -> Boundary:
        return Boundary(source, target, tuple(self._carried(node) for node in nodes))

    def _carried(self, node: Node) -> Carried:
        value = meta.tensor(node)
        if value is None:
            raise PartitionError(
                f"a value that is no tensor would have to cross between stages: {node.name}",
                where=meta.note(node).source,
                do="cut the model elsewhere (Plan(split=...))",
            )
        shape = tuple(expression(self.program.fake_mode, size) for size in value.shape)
        return Carried(node.name, value.dtype, value.device.type, shape)

    def _parameter_stages(self, stages: Sequence[Stage]) -> dict[str, tuple[int, ...]]:
        found: dict[str, list[int]] = {}
        for stage in stages:
            programs = [stage.forward, *([stage.backward] if stage.backward is not None else [])]
            names = {what.name for p in programs for what in p.inputs if isinstance(what, role.Param)}
            names |= {what.name for p in programs for what in p.outputs if isinstance(what, role.Grad)}
            for name in names:
                found.setdefault(name, []).append(stage.index)
        return {name: tuple(found[name]) for name in sorted(found)}


def _numbered(nodes: Sequence[Node], source: int, target: int) -> dict[Node, Role]:
    return {node: role.Activation(source, target, i) for i, node in enumerate(nodes)}
