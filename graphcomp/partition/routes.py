"""Routes: how each value gets from the stage that makes it to those that need it.

A microbatch passes the slots F0, F1, ..., F(n-1), B(n-1), ..., B0. A value may be kept on its stage (saved, from F(s)
to B(s)) or handed to the neighbour in the next slot. Each hop sends it once, however many stages behind it need it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch.fx import Node

from graphcomp.compat.aliasing import viewed_argument
from graphcomp.errors import PartitionError
from graphcomp.ir import meta
from graphcomp.partition.place import Slot
from graphcomp.partition.traits import is_alias, is_number, is_view


@dataclass
class Routes:
    """What crosses: down[s] from F(s) to F(s+1), up[s] from B(s) to B(s-1), saved[s] from F(s) to B(s); graph order."""

    down: dict[int, list[Node]] = field(default_factory=dict)
    up: dict[int, list[Node]] = field(default_factory=dict)
    saved: dict[int, list[Node]] = field(default_factory=dict)

    def sort(self, order: Mapping[Node, int]) -> None:
        for table in (self.down, self.up, self.saved):
            for stage, nodes in table.items():
                table[stage] = sorted(set(nodes), key=order.__getitem__)


def needs(node: Node, slot: Slot, slots: Mapping[Node, Slot], replicable: set[Node], copied: set[Node]) -> list[Node]:
    """The values from outside that `slot` needs in order to run `node`.

    Replicable nodes are computed in place, except that a backward takes from its own forward what that one computed
    already (`copied`: the replicable nodes that the stage's forward runs). Behind a pure view lies its base.
    """
    found: list[Node] = []
    pending = list(node.all_input_nodes)
    seen: set[Node] = set()
    while pending:
        current = pending.pop()
        if current in seen or current.op == "placeholder":
            continue
        seen.add(current)
        if current in replicable:
            keep = slot.backward and current in copied and not is_number(current) and not is_view(current)
            if keep:
                found.append(current)
            else:
                pending.extend(current.all_input_nodes)
        elif slots[current] != slot:
            if _is_shown_again(current, slots, slot):
                pending.extend(current.all_input_nodes)
            else:
                found.append(current)
    return found


def _is_shown_again(node: Node, slots: Mapping[Node, Slot], slot: Slot) -> bool:
    """Whether a slot had better repeat a view than get it beside its base: an alias, or of its own forward."""
    if is_alias(node):
        return True
    own_forward = slot.backward and slots[node] == Slot(False, slot.stage)
    base = viewed_argument(node)
    return own_forward and is_view(node) and base is not None and isinstance(meta.value(base), torch.Tensor)


def route(value: Node, start: Slot, targets: set[Slot], routes: Routes) -> None:
    """Enter one value, made in slot `start` and needed in the slots `targets`, into the tables."""
    forward = [slot.stage for slot in targets if not slot.backward]
    backward = [slot.stage for slot in targets if slot.backward]
    if start.backward:
        if forward or any(stage > start.stage for stage in backward):
            raise PartitionError(
                f"a value of the backward on stage {start.stage} would be needed before it exists",
                where=f"{value.name}, {meta.note(value).source or 'no source line'}",
                do="cut the model elsewhere (Plan(split=...))",
            )
        for stage in range(start.stage, min(backward, default=start.stage), -1):
            routes.up.setdefault(stage, []).append(value)
        return
    highest = max([start.stage, *forward, *(stage for stage in backward)])
    for stage in range(start.stage, highest):
        routes.down.setdefault(stage, []).append(value)
    lowest = min(backward, default=highest + 1)
    for stage in backward:
        if stage >= start.stage:
            routes.saved.setdefault(stage, []).append(value)
    if lowest < start.stage:
        routes.saved.setdefault(start.stage, []).append(value)
        for stage in range(start.stage, lowest, -1):
            routes.up.setdefault(stage, []).append(value)
