"""Homes: the stages that hold each parameter and buffer. The first cut decides; later specialisations are cut to fit.

A rank trains and updates only what its stages hold. A specialisation that were cut elsewhere (evaluation, which has no
backward to weigh; other sizes) would read copies that nobody updates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch.fx import Node

from graphcomp.errors import PartitionError, StateError
from graphcomp.ir import signature as role
from graphcomp.ir.program import Program
from graphcomp.partition.balance import crossing_bytes, depth
from graphcomp.partition.run_time_sizes import uncuttable
from graphcomp.partition.stages import Stage

Homes = Mapping[str, tuple[int, ...]]


def homes_of(stages: Sequence[Stage]) -> dict[str, tuple[int, ...]]:
    """For every parameter and buffer, the stages whose programs read it or yield its gradient, ascending."""
    found: dict[str, list[int]] = {}
    kinds = (role.Param, role.Buffer, role.Grad, role.BufferUpdate)
    for stage in stages:
        names = {what.name for p in stage.programs for what in (*p.inputs, *p.outputs) if isinstance(what, kinds)}
        for name in names:
            found.setdefault(name, []).append(stage.index)
    return {name: tuple(found[name]) for name in sorted(found)}


def kept_cuts(program: Program, forward: Sequence[Node], replicable: set[Node], homes: Homes, stages: int) -> list[int]:
    """The cuts under which each forward node that reads state lies where that state is; else as cheap as can be.

    Raises PartitionError if the code uses its state in another order than the first cut had it.
    """
    state = {node: what.name for what, node in program.input_nodes() if isinstance(what, role.Param | role.Buffer)}
    crossing = crossing_bytes(forward)
    needed = _ranges([_homes(node, replicable, state, homes) for node in forward], stages)
    inside, cuts = uncuttable(forward), list[int]()
    for stage in range(1, stages):
        first = max([cuts[-1] if cuts else 0, *(i + 1 for i, (low, high) in enumerate(needed) if high < stage)])
        last = min((i for i, (low, high) in enumerate(needed) if low >= stage), default=len(forward) - 1)
        possible = [i for i in range(first, last + 1) if i not in inside]
        if not possible:
            raise PartitionError(
                "this kind of microbatch uses the model's parameters in another order than the first one did, "
                f"so no cut leaves them on their stages: none lies between stages {stage - 1} and {stage}",
                do="name the cuts (Plan(split=...)), or compile an example first that runs the whole model",
            )
        cuts.append(min(possible, key=lambda i: (crossing[i], depth(forward, i), -i)))
    return cuts


def require_homes(found: Homes, homes: Homes) -> None:
    """Raises PartitionError, naming the first, if something is read on a stage that does not hold it."""
    for name, stages in found.items():
        if name in homes and not set(stages) <= set(homes[name]):
            raise PartitionError(
                f"'{name}' would be used on another stage than the one that holds it",
                expected=f"stages {homes[name]}",
                got=f"stages {stages}",
                do="name the cuts (Plan(split=...)), so that every kind of microbatch is cut alike",
            )


def require_one_home(stages: Sequence[Stage], homes: Homes) -> None:
    """Raises StateError, naming the first, for a buffer that one stage writes and another holds, which would not see
    what is written."""
    for stage in stages:
        names = {what.name for p in stage.programs for what in p.outputs if isinstance(what, role.BufferUpdate)}
        for name in sorted(names):
            others = [one for one in homes.get(name, ()) if one != stage.index]
            if others:
                raise StateError(
                    f"buffer '{name}' is written on stage {stage.index} and read on stage {others[0]} by microbatches "
                    "of another kind, which would find an old value",
                    where=f"buffer '{name}'",
                    do="cut the model so that one stage holds all uses of the buffer (Plan(split=...))",
                )


def _ranges(held: Sequence[frozenset[int] | None], stages: int) -> list[tuple[float, float]]:
    """The lowest and highest stage of each of these nodes, in order: stages never go down along them.

    held: the stages that hold what a node reads; None: any. A shared parameter may be held by the first and the last
    stage alone, so a node that reads it behind what stage 2 holds is bound to the last.
    """
    lows: list[float] = []
    low: float = 0
    for where in held:
        own = low if where is None else min((s for s in where if s >= low), default=min(where))
        lows.append(own if where is not None else -float("inf"))
        low = max(low, own)
    highs: list[float] = []
    high: float = stages - 1
    for where in reversed(held):
        own = high if where is None else max((s for s in where if s <= high), default=max(where))
        highs.append(own if where is not None else float("inf"))
        high = min(high, own)
    return list(zip(lows, reversed(highs), strict=True))


def _homes(node: Node, replicable: set[Node], state: Mapping[Node, str], homes: Homes) -> frozenset[int] | None:
    """The stages that hold all state that a node reads; None, if it reads no state that has a home."""
    found: frozenset[int] | None = None
    pending = list(node.all_input_nodes)
    while pending:
        current = pending.pop()
        if current in state and state[current] in homes:
            held = frozenset(homes[state[current]])
            found = held if found is None else (found & held or held)
        elif current in replicable:
            pending.extend(current.all_input_nodes)
    return found
