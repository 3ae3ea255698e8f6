"""Checkpointed regions: what their forward computed, the backward computes again from what the region was given.

Level: the joint program, once its nodes have their stages; so it holds where a stage's forward and backward are
programs of their own, and where they are one.

    forward:  a = mm(x, w)  b = sin(a)  y = mm(b, v)          # region 0 was given x
    backward: gb = mm(gy, v.t)  ga = mul(gb, cos(a))      ->  a_again = mm(x, w)  ga = mul(gb, cos(a_again))

Sound: the same operations on the same values give the same bits. Never repeated, so kept: what is drawn, what other
ranks have a part in, and what the user's policy saves. A region that spans stages begins anew on each: what arrives
there is kept. Copies are backward nodes, so that no pass merges them with what they repeat.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from graphcomp.ir import meta
from graphcomp.ir.effects import finds_places, is_collective, reads_numbers
from graphcomp.ir.meta import Phase
from graphcomp.ir.program import Program
from graphcomp.ir.randomness import draws, is_seeded
from graphcomp.partition.costs import size_bytes
from graphcomp.partition.place import Slot
from graphcomp.partition.traits import is_number, is_part, is_view, order_of


def recompute_regions(program: Program, slots: dict[Node, Slot], replicable: set[Node]) -> None:
    """Have the backward nodes of each region read copies, made right before their first use, of its forward values."""
    regions = {meta.note(node).recompute for node in program.calls()} - {None}
    if regions:
        _Copier(program, slots, replicable).run()


class _Copier:
    def __init__(self, program: Program, slots: dict[Node, Slot], replicable: set[Node]) -> None:
        self.program, self.slots, self.replicable = program, slots, replicable
        self.order = order_of(program.graph)
        self.once = set(_computed_once(program))
        self.regions: dict[int | None, int | None] = {
            meta.note(node).operation: meta.note(node).recompute
            for node in program.calls()
            if meta.note(node).phase is not Phase.BACKWARD and meta.note(node).operation is not None
        }
        self.copies: dict[tuple[Node, int], Node] = {}
        self.present: set[tuple[Node, int]] = set()
        """What the backward of a stage has anyway, since something outside of the value's region reads it."""

    def run(self) -> None:
        for node in self.program.calls():
            slot = self.slots.get(node)
            if slot is None or not slot.backward:
                continue
            region = self.regions.get(meta.note(node).operation)
            for value in node.all_input_nodes:
                if self._is_repeated(value, region, slot.stage):
                    node.replace_input_with(value, self._copy(value, region, slot.stage, before=node))
                else:
                    self.present.add((value, slot.stage))

    def _is_repeated(self, value: Node, region: int | None, stage: int) -> bool:
        """Whether the backward of a region computes a value again on this stage."""
        if region is None or value.op == "placeholder" or meta.note(value).recompute != region:
            return False
        if meta.note(value).phase is Phase.BACKWARD or is_number(value):
            return False
        if value in self.once or (value, stage) in self.present:
            return False
        if value in self.replicable:
            return not is_view(value)  # which every program shows for itself
        return self.slots[value] == Slot(False, stage)

    def _copy(self, value: Node, region: int | None, stage: int, before: Node) -> Node:
        """The copy of a value, with all that leads to it within the region, in front of a node."""
        needed: set[Node] = set()
        pending = [value]
        while pending:
            node = pending.pop()
            if node in needed or (node, stage) in self.copies:
                continue
            needed.add(node)
            for source in node.all_input_nodes:
                if self._is_repeated(source, region, stage):
                    pending.append(source)
                else:
                    self.present.add((source, stage))

        def copied(source: Node) -> Node:
            return self.copies.get((source, stage), source)

        graph = self.program.graph
        for node in sorted(needed, key=self.order.__getitem__):
            with graph.inserting_before(before):
                args, kwargs = map_arg((node.args, node.kwargs), copied)
                new = graph.create_node(node.op, node.target, args, kwargs, f"{node.name}_again")
            new.meta = dict(node.meta)
            meta.amend(new, phase=Phase.BACKWARD, operation=None)
            self.slots[new] = Slot(True, stage)
            self.copies[node, stage] = new
        return self.copies[value, stage]


def _computed_once(program: Program) -> Iterator[Node]:
    """The values of regions that are kept whatever the memory: draws, results of other ranks, the user's choice; places
    of rows, whose number was read, for a mask that a compiler rounds another way would have another number.

    Of a mask that is made of a draw alone, and smaller, the mask is kept. What belongs to a tuple stays with it.
    """
    once: set[Node] = set()
    drawn: set[Node] = set()
    for node in program.calls():
        if meta.note(node).recompute is None or meta.note(node).phase is Phase.BACKWARD:
            continue
        tensors = [n for n in node.all_input_nodes if isinstance(meta.value(n), torch.Tensor)]
        is_draw = draws(node) or is_seeded(node)
        is_mask = bool(tensors) and drawn.issuperset(tensors) and size_bytes(node) < sum(map(size_bytes, tensors))
        if is_draw or is_mask:
            drawn.add(node)
        kept = meta.note(node).kept or finds_places(node)
        belongs = is_part(node) and node.all_input_nodes[0] in once
        if is_draw or is_mask or belongs or is_collective(node) or reads_numbers(node) or kept:
            once.add(node)
            yield node
