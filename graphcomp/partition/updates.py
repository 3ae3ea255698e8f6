"""Updates of buffers that several data ranks change: lifted out of the forward, to be run in the order of data ranks.

Level: the joint program, once its nodes have their stages.

    forward:  m = mean(x)  u = add(mul(old, 0.9), mul(m, 0.1))   return update mean = u
    ->
    forward:  m = mean(x)  s = mul(m, 0.1)                        return statistic 0 = s
    update:   u = add(mul(old, 0.9), s)                           return update mean = u

Sound: what is moved reads the buffers, what it is moved behind does not. A buffer that anything else reads cannot be
lifted, and is refused: the reference has its data ranks one after the other, here they run side by side.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from graphcomp.compat.aliasing import viewed_argument
from graphcomp.errors import StateError
from graphcomp.ir import meta
from graphcomp.ir import signature as role
from graphcomp.ir.calls import upstream
from graphcomp.ir.effects import is_impure
from graphcomp.ir.program import Program
from graphcomp.partition.costs import size_bytes
from graphcomp.partition.extract import extract
from graphcomp.partition.place import Slot
from graphcomp.partition.run_time_sizes import has_run_time_size
from graphcomp.partition.traits import is_number


@dataclass(frozen=True)
class Update:
    """What becomes of a stage's buffers with each microbatch. nodes: moved out of the forward, in order.

    statistics: what they read that the forward computes. results: the new values.
    """

    nodes: tuple[Node, ...]
    statistics: tuple[Node, ...]
    results: tuple[tuple[role.Role, Node], ...]

    def program(self, program: Program, stage: int) -> Program:
        given: dict[Node, role.Role] = {node: role.Statistic(i) for i, node in enumerate(self.statistics)}
        own = set(self.nodes)
        return extract(
            program,
            f"stage {stage} update",
            self.nodes,
            given,
            self.results,
            computes=lambda node: node in own or is_number(node),
        )


def lift_updates(
    program: Program, slots: dict[Node, Slot], replicable: set[Node], last: int, outputs: bool
) -> dict[int, Update]:
    """The updates of all buffers that the program changes, by stage. May put copies of statistics into the program.

    slots: of owned nodes; `replicable` are the others. last: the stage of what has no owner. outputs: whether the
    model's own are kept. Raises StateError, naming buffer and line, for a buffer that is read for anything else.
    """
    results = {what.name: node for what, node in program.output_items() if isinstance(what, role.BufferUpdate)}
    buffers = {what.name: node for what, node in program.input_nodes() if isinstance(what, role.Buffer)}
    changed = {node: name for name, node in buffers.items() if name in results}
    moved = _readers(program, changed)
    _check_readers(program, changed, moved, outputs)
    found: dict[int, Update] = {}
    for stage, names in _by_stage(results, moved, slots, last).items():
        wanted = [(role.BufferUpdate(name), results[name]) for name in names]
        needed = upstream((node for _, node in wanted), within=moved)
        nodes = tuple(node for node in moved if node in needed)
        read = [source for node in nodes for source in node.all_input_nodes] + [node for _, node in wanted]
        statistics = {node: None for node in read if node not in needed and _is_statistic(node, program)}
        kept = {
            node: _copied(program, node, slots, replicable)
            for node in statistics
            if _has_to_be_copied(node, slots, stage)
        }
        for node in nodes:
            slots.pop(node, None)
            for old, new in kept.items():
                node.replace_input_with(old, new)
        ends = tuple((what, kept.get(node, node)) for what, node in wanted)
        found[stage] = Update(nodes, tuple(kept.get(node, node) for node in statistics), ends)
    return found


def _readers(program: Program, changed: Mapping[Node, str]) -> dict[Node, str]:
    """The nodes whose values depend on what a buffer was before, in order, with the first such buffer's name."""
    found: dict[Node, str] = {}
    for node in program.calls():
        of = next((changed.get(n) or found.get(n) for n in node.all_input_nodes if n in changed or n in found), None)
        if of is not None:
            found[node] = of
    return found


def _check_readers(program: Program, changed: Mapping[Node, str], moved: Mapping[Node, str], outputs: bool) -> None:
    """Raise StateError for a buffer that something else than updates depends on."""
    elsewhere = {
        node: what
        for what, node in program.output_items()
        if node is not None
        and not isinstance(what, role.BufferUpdate)
        and (outputs or not isinstance(what, role.Output))
    }
    needed = upstream(elsewhere)
    bad = [node for node in moved if node in needed]
    if bad:
        first = _where_read(program, changed, moved, bad)
        raise _refusal(moved[first], "its old value reaches more than updates of buffers", _place(first))
    for node, name in changed.items():
        if node in elsewhere:
            raise _refusal(name, f"it is the model's {elsewhere[node]}", None)
    for node, name in moved.items():
        if is_impure(node) or any(map(has_run_time_size, (node, *node.all_input_nodes))):
            raise _refusal(name, f"its update holds the operation {node.target}", _place(node))


def _where_read(program: Program, changed: Mapping[Node, str], moved: Mapping[Node, str], bad: Sequence[Node]) -> Node:
    """The first node at which a buffer meets the rest of the model, rather than being brought up to date."""
    results = [n for what, n in program.output_items() if isinstance(what, role.BufferUpdate)]
    updating = upstream(results)

    def meets(node: Node) -> bool:
        others = (n for n in node.all_input_nodes if n not in changed and n not in moved and not is_number(n))
        return any(True for _ in others) and node not in results

    leaves = [n for n in bad if n not in updating or any(u in bad and u not in updating for u in n.users)]
    return next(filter(meets, leaves), next(iter(leaves), bad[0]))


def _refusal(name: str, got: str, where: str | None) -> StateError:
    return StateError(
        f"buffer '{name}' is changed in forward and read by it: data ranks, which run at the same time, would "
        "each read another value",
        where=where or f"buffer '{name}'",
        expected="where there is more than one data rank, changed buffers that nothing but updates of buffers reads",
        got=got,
        do="read it outside of forward, or give its value with the batch; or freeze it (model.eval() for its module)",
    )


def _place(node: Node) -> str:
    return ", ".join((*reversed(meta.place(node)), f"operation {node.target}"))


def _by_stage(
    results: Mapping[str, Node], moved: Mapping[Node, str], slots: Mapping[Node, Slot], last: int
) -> dict[int, list[str]]:
    """The buffers that each stage updates."""
    found: dict[int, list[str]] = {}
    for name, node in results.items():
        stages = {slots[one].stage: one for one in [node, *upstream([node], within=moved)] if one in slots}
        if len(stages) > 1:
            raise StateError(
                f"buffer '{name}' is updated on stage {max(stages)} from what stage {min(stages)} holds",
                where=_place(stages[max(stages)]),
                do="cut the model so that one stage holds all uses of these buffers (Plan(split=...))",
            )
        found.setdefault(next(iter(stages), last), []).append(name)
    return found


def _is_statistic(node: Node, program: Program) -> bool:
    """Whether the forward has to yield a value. What every program has, and numbers made of sizes, it need not."""
    if node.op == "placeholder":
        return isinstance(program.inputs[program.placeholders.index(node)], role.Param)
    return not is_number(node)


def _has_to_be_copied(node: Node, slots: Mapping[Node, Slot], stage: int) -> bool:
    """A view of more would keep all that until the step's end. From a stage above, values come in messages: dense."""
    base: Node | None = node
    while base is not None and (source := viewed_argument(base)) is not None:
        base = source
    above = slots[node].stage < stage if node in slots else False
    return above or (base is not None and size_bytes(base) > size_bytes(node))


def _copied(program: Program, node: Node, slots: dict[Node, Slot], replicable: set[Node]) -> Node:
    dense: dict[str, Any] = {"memory_format": torch.contiguous_format}
    with program.graph.inserting_after(node):
        copy = program.graph.call_function(torch.ops.aten.clone.default, (node,), dense)
    value = meta.tensor(node)
    if value is not None:
        with program.fake_mode:
            meta.set_value(copy, value.clone(**dense))
    meta.inherit(copy, node)
    if node in slots:
        slots[copy] = slots[node]
    else:
        replicable.add(copy)
    return copy
