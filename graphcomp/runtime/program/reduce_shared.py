"""Gradients of parameters that several stages use: summed once, at the end of a step.

The lowest stage that holds the parameter receives the share of every other stage that has one, adds them in
ascending order of stages (`gather_shares`), and sends the sum to all other holders (`spread_sum`). So every copy is
bitwise the same, whatever the transport and wherever the stages are: what is on one rank is added there without a
message, and a rank gets the sum once. With data ranks the sum over them is taken in between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass

import torch

from graphcomp.dataparallel.step import DataParallel
from graphcomp.errors import PartitionError
from graphcomp.ir.meta import tensor
from graphcomp.ir.signature import Grad, Param
from graphcomp.partition.stages import Carried, Partitioned
from graphcomp.runtime.program.instructions import (
    AddGradient,
    Edge,
    Instruction,
    JoinGradient,
    PostReceive,
    ReplaceGradient,
    SendGradient,
    WaitReceive,
)
from graphcomp.schedule.actions import Kind
from graphcomp.schedule.schedule import Schedule


@dataclass(frozen=True)
class SharedGradient:
    """A parameter with several holders. sources: the holders that have a gradient for it in this step, ascending.

    value: one share of the gradient. result: what the other holders get in the end.
    """

    value: Carried
    holders: tuple[int, ...]
    sources: tuple[int, ...]
    crosses: bool
    result: Carried

    @property
    def name(self) -> str:
        return self.value.name


def shared_gradients(
    specialisations: Sequence[Partitioned], schedule: Schedule, data: DataParallel | None = None
) -> list[SharedGradient]:
    """What has to be summed; the same list on every rank, as it follows from the programs alone.

    data: names parameters that other data ranks have a gradient for, though no stage here has.
    """
    holders: dict[str, set[int]] = {}
    for homes in [one.parameter_stages for one in specialisations] + ([] if data is None else [data.homes]):
        for name, stages in homes.items():
            holders.setdefault(name, set()).update(stages)
    several = {name: tuple(sorted(stages)) for name, stages in sorted(holders.items()) if len(stages) > 1}
    if not several:
        return []
    sources = _sources(specialisations, schedule)
    found = []
    for name, stages in several.items():
        own = tuple(stage for stage in stages if (stage, name) in sources)
        elsewhere = data is not None and name in data.reduced
        if own or elsewhere:
            value = _carried(name, specialisations) if data is None else data.carried(name)
            result = value if data is None else data.carried(name, reduced=True)
            crosses = len({schedule.rank_of(stage) for stage in stages}) > 1
            found.append(SharedGradient(value, stages, own, crosses, result))
    return found


@dataclass
class SharedLowering:
    """The instructions of one rank for shared gradients. gradients: its accumulators; gets one for each it holds."""

    rank: int
    schedule: Schedule
    gradients: MutableMapping[tuple[int, str], int]
    new_register: Callable[[], int]
    new_slot: Callable[[object], int]

    def gather_shares(self, shared: SharedGradient) -> Iterator[Instruction]:
        """Sum the shares at the lowest stage that holds the parameter."""
        name, root, held = shared.name, shared.holders[0], self._held(shared)
        if not held:
            return
        own = self.gradients.setdefault((held[0], name), len(self.gradients))
        if root not in held:
            for stage in held:
                if stage in shared.sources:
                    up = Edge(stage, root)
                    yield SendGradient(up, self.gradients[stage, name], (shared.value,), self.new_slot((name, up)))
            return
        others = [stage for stage in shared.sources if stage != root]
        for stage in others:
            if stage not in held:
                yield PostReceive(Edge(stage, root), None, (shared.value,), self.new_slot((name, Edge(stage, root))))
        begun = root in shared.sources
        for stage in others:
            if stage in held:
                yield JoinGradient(own, self.gradients[stage, name], begun)
            else:
                register = self.new_register()
                yield WaitReceive(Edge(stage, root), None, self.new_slot((name, Edge(stage, root))), (register,))
                yield AddGradient(own, register) if begun else ReplaceGradient(own, register)
            begun = True

    def spread_sum(self, shared: SharedGradient) -> Iterator[Instruction]:
        """Give the sum to the other holders."""
        name, root, held = shared.name, shared.holders[0], self._held(shared)
        if not held:
            return
        own = self.gradients[held[0], name]
        if root in held:
            # The lowest stage on each of the other ranks.
            firsts = {self.schedule.rank_of(stage): stage for stage in reversed(shared.holders)}
            for stage in sorted(set(firsts.values()) - {root}):
                edge = Edge(root, stage)
                yield SendGradient(edge, own, (shared.result,), self.new_slot((name, edge)))
        else:
            down = Edge(root, held[0])
            yield PostReceive(down, None, (shared.result,), self.new_slot((name, down)))
            register = self.new_register()
            yield WaitReceive(down, None, self.new_slot((name, down)), (register,))
            yield ReplaceGradient(own, register)
        for stage in held[1:]:
            if (stage, name) in self.gradients:
                yield JoinGradient(self.gradients[stage, name], own, adds=False)

    def _held(self, shared: SharedGradient) -> list[int]:
        """The stages of this rank that hold the parameter, ascending."""
        return [stage for stage in shared.holders if self.schedule.rank_of(stage) == self.rank]


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
