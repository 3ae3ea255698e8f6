"""The driver of local rewrites: a rewrite looks at one node, the driver owns worklist and bookkeeping."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from enum import Enum

from torch.fx import Node

from graphcomp.ir import meta
from graphcomp.ir.meta import Phase
from graphcomp.ir.program import Program
from graphcomp.passes.operations import settle_operations


class Erase(Enum):
    """What a rewrite answers to have the node erased; it must have no users."""

    NODE = "erase"


ERASE = Erase.NODE

Rewrite = Callable[[Node], Node | Erase | None]
"""Looks at one call node. Answers None (it stays), the node itself (the rewrite has changed its arguments), another
node (use that in its place) or ERASE.

New nodes are inserted by the rewrite itself, with their values; the driver copies the annotation to them.
"""


def rewrite_nodes(program: Program, rewrite: Rewrite, *, backwards: bool = False) -> int:
    """Apply `rewrite` to every call node, and again where a change may have opened something up.

    Order: as the graph stands (or from its end); after a change the users (or the inputs) are looked at
    again. Backward nodes of an operation follow its node to the one in its place. Returns the number of
    changes.
    """
    calls = program.calls()
    known = set(calls)
    work = deque(reversed(calls) if backwards else calls)
    waiting, gone = set(work), set[Node]()
    moved: dict[int, int | None] = {}
    changes = 0

    def look_again(nodes: list[Node]) -> None:
        for other in nodes:
            if other.op == "call_function" and other not in waiting:
                waiting.add(other)
                work.append(other)

    while work:
        node = work.popleft()
        waiting.discard(node)
        answer = None if node in gone else rewrite(node)
        if answer is None:
            continue
        changes += 1
        near = list(node.all_input_nodes if backwards else node.users)
        if answer is node:
            look_again([node, *near])
            continue
        successor = answer if isinstance(answer, Node) else None
        if successor is not None:
            if successor.op == "call_function" and successor not in known:
                known.add(successor)
                meta.inherit(successor, node)
            near.append(successor)
            node.replace_all_uses_with(successor)
        old, new = (meta.note(n).operation if n is not None else None for n in (node, successor))
        if old is not None and old != new and meta.note(node).phase is not Phase.BACKWARD:
            moved[old] = new
        program.graph.erase_node(node)
        gone.add(node)
        look_again(near)
    settle_operations(program, moved)
    return changes
