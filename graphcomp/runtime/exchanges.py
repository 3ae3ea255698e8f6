"""What the data ranks do together while their pipelines run: in one order on all of them, or they would not meet."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from graphcomp.compat.process_groups import ranks_of
from graphcomp.ir import meta
from graphcomp.ir.collective_calls import axis_of, is_start
from graphcomp.ir.program import Program
from graphcomp.ir.spelling import Symbols, operation, value
from graphcomp.partition import Partitioned
from graphcomp.partition.stages import Stage
from graphcomp.schedule.actions import Action, Kind

AXIS = "dp"


@dataclass(frozen=True)
class Exchanges:
    """One line for each, in order."""

    lines: tuple[str, ...] = ()

    @cached_property
    def number(self) -> int:
        """The same in every process for equal exchanges; 0 for none."""
        if not self.lines:
            return 0
        return int.from_bytes(hashlib.sha256("\n".join(self.lines).encode()).digest()[:7])


def exchanges(
    actions: Sequence[Action], specialisations: Sequence[Partitioned], regather: bool, peers: Sequence[int] = ()
) -> Exchanges:
    """Of a rank that does these actions; what is done once a step is not among them.

    specialisations: one a microbatch. regather: parameters are gathered before each action. peers: the global ranks
    that hold the same stage in all pipelines; collectives of the model over all of them count.
    """
    lines = []
    for action in actions:
        cut = specialisations[action.microbatch]
        program = _program(cut.stages[action.stage], action)
        if program is not None:
            found = ["gathers its parameters"] if regather else []
            found += _collectives(program, cut, set(peers))
            lines += [f"stage {action.stage}, {action.kind.name}: {text}" for text in found]
    return Exchanges(tuple(lines))


def _program(stage: Stage, action: Action) -> Program | None:
    return {Kind.F: stage.forward, Kind.B: stage.backward, Kind.FB: stage.fused}.get(action.kind)


def _collectives(program: Program, cut: Partitioned, peers: set[int]) -> Iterator[str]:
    symbols = Symbols(program)
    for node in filter(is_start, program.calls()):
        group = axis_of(node) or ""
        name = cut.joint.groups.get(group)
        if group == AXIS or (name is not None and peers and peers <= set(ranks_of(name))):
            source = meta.note(node).source
            where = f" at {source}" if source else ""
            yield f"{operation(node.target)} over {group}, gives {value(meta.value(node), symbols)}{where}"
