"""Gradients of parameters that several stages use: summed once, at the end of a step.

The lowest stage that holds the parameter receives the share of every other stage that has one, adds them in
ascending order of stages, and sends the sum to all other holders. So every copy is bitwise the same,
whatever the transport.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass

import torch

from graphcomp.errors import PartitionError
from graphcomp.ir.meta import tensor
from graphcomp.ir.signature import Grad, Param
from graphcomp.partition.stages import Carried, Partitioned
from graphcomp.runtime.instructions import (
    Accumulate,
    Edge,
    Instruction,
    PostReceive,
    ReplaceGradient,
    SendGradient,
    WaitReceive,
)
from graphcomp.schedule.actions import Kind
from graphcomp.schedule.schedule import Schedule


@dataclass(frozen=True)
class SharedGradient:
    """A parameter with several holders. sources: the holders that have a gradient for it in this step,
    ascending.
    """

    value: Carried
    holders: tuple[int, ...]
    sources: tuple[int, ...]
    crosses: bool

    @property
    def name(self) -> str:
        return self.value.name


def shared_gradients(specialisations: Sequence[Partitioned], schedule: Schedule) -> list[SharedGradient]:
    """What has to be summed; the same list on every rank, as it follows from the programs alone."""
    holders: dict[str, set[int]] = {}
    for one in specialisations:
        for name, stages in one.parameter_stages.items():
            holders.setdefault(name, set()).update(stages)
    several = {name: tuple(sorted(stages)) for name, stages in sorted(holders.items()) if len(stages) > 1}
    if not several:
        return []
    sources = _sources(specialisations, schedule)
    return [
        SharedGradient(
            _carried(name, specialisations),
            stages,
            tuple(stage for stage in stages if (stage, name) in sources),
            len({schedule.rank_of(stage) for stage in stages}) > 1,
        )
        for name, stages in several.items()
        if any((stage, name) in sources for stage in stages)
    ]


def shared_instructions(
    shared: SharedGradient,
    schedule: Schedule,
    rank: int,
    gradients: MutableMapping[tuple[int, str], int],
    new_register: Callable[[], int],
    new_slot: Callable[[object], int],
) -> Iterator[Instruction]:
    """This rank's part in the sum of one parameter. Adds accumulators for holders that have no share of
    their own.
    """
    name, root = shared.name, shared.holders[0]
    if any(schedule.rank_of(stage) != stage for stage in shared.holders):
        raise PartitionError(
            f"parameter '{name}' is shared by stages that do not have a rank each",
            got=f"stages {shared.holders}",
        )
    if rank not in shared.holders:
        return
    own = gradients.setdefault((rank, name), len(gradients))
    if rank != root:
        up, down = Edge(rank, root), Edge(root, rank)
        if rank in shared.sources:
            yield SendGradient(up, own, (shared.value,), new_slot((name, up)))
        yield PostReceive(down, None, (shared.value,), new_slot((name, down)))
        register = new_register()
        yield WaitReceive(down, None, new_slot((name, down)), (register,))
        yield ReplaceGradient(own, register)
        return
    others = [stage for stage in shared.sources if stage != root]
    for stage in others:
        yield PostReceive(Edge(stage, root), None, (shared.value,), new_slot((name, Edge(stage, root))))
    begun = root in shared.sources
    for stage in others:
        register = new_register()
        yield WaitReceive(Edge(stage, root), None, new_slot((name, Edge(stage, root))), (register,))
        yield Accumulate(((own, register),), ()) if begun else ReplaceGradient(own, register)
        begun = True
    for stage in shared.holders[1:]:
        yield SendGradient(Edge(root, stage), own, (shared.value,), new_slot((name, Edge(root, stage))))


def _sources(specialisations: Sequence[Partitioned], schedule: Schedule) -> set[tuple[int, str]]:
    """The (stage, parameter) that some scheduled backward yields a gradient for."""
    found: set[tuple[int, str]] = set()
    seen: set[tuple[int, int]] = set()
    for actions in schedule.ranks:
        for action in actions:
            key = (id(specialisations[action.microbatch]), action.stage)
            if action.kind not in (Kind.B, Kind.FB) or key in seen:
                continue
            seen.add(key)
            stage = specialisations[action.microbatch].stages[action.stage]
            program = stage.backward if action.kind is Kind.B else stage.fused
            items: Mapping = dict(program.output_items()) if program is not None else {}
            found |= {
                (action.stage, role.name) for role, node in items.items() if isinstance(role, Grad) and node is not None
            }
    return found


def _carried(name: str, specialisations: Sequence[Partitioned]) -> Carried:
    for one in specialisations:
        for stage in one.stages:
            for program in (stage.forward, stage.fused):
                if program is not None and Param(name) in program.inputs:
                    value = tensor(program.input(Param(name)))
                    if isinstance(value, torch.Tensor):
                        shape = tuple(int(size) for size in value.shape)
                        return Carried(name, value.dtype, value.device.type, shape)
    raise PartitionError(f"shared parameter '{name}' is an input of no stage")
