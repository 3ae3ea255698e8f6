"""Step programs made callable: over a process group, or over virtual data ranks that meet in this process."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from graphcomp.compat.process_groups import group_of
from graphcomp.dataparallel.build import collectives_of
from graphcomp.dataparallel.in_place import reduce_in_place
from graphcomp.dataparallel.step import DataParallel
from graphcomp.ir import meta
from graphcomp.ir.collective_calls import is_wait
from graphcomp.ir.interp import boxed_callable, pausing_callable
from graphcomp.ir.lockstep import lockstep
from graphcomp.ir.program import Program
from graphcomp.runtime.program.link import StepCall, StepCalls, StepKind
from graphcomp.runtime.program.turns import VirtualTurns, process_turns, turns_of


def process_calls(data: DataParallel, stages: Sequence[int], group: str) -> StepCalls:
    """What these stages do over data ranks, on this process. group: the name of the process group of the data ranks."""
    calls: dict[tuple[StepKind, int], StepCall] = {
        key: _process_call(reduce_in_place(program), {data.axis: group}) for key, program in _programs(data, stages)
    }
    over = group_of(group)
    for stage in stages:
        for kind, turns in turns_of(data, stage, over.rank()):
            calls[kind, stage] = process_turns(turns, over.rank(), over)
    return calls


def virtual_calls(data: DataParallel, stages: Sequence[int]) -> list[StepCalls]:
    """For each virtual data rank: the same, where all of them meet."""
    found: list[dict[tuple[StepKind, int], StepCall]] = [{} for _ in range(data.ranks)]
    for key, program in _programs(data, stages):
        meeting = _Meeting(program, data.ranks, data.axis)
        for rank, calls in enumerate(found):
            calls[key] = _step_call(program, meeting.of(rank))
    for stage in stages:
        together = VirtualTurns(data.turns_on(stage), data.ranks)
        for rank, calls in enumerate(found):
            for kind, turns in turns_of(data, stage, rank):
                calls[kind, stage] = together.of(turns, rank)
    return list(found)


def step_programs(data: DataParallel, stages: Iterable[int]) -> list[Program]:
    """All step programs of these stages, in order."""
    return [program for _, program in _programs(data, stages)]


def _programs(data: DataParallel, stages: Iterable[int]) -> list[tuple[tuple[StepKind, int], Program]]:
    found: list[tuple[tuple[StepKind, int], Program | None]] = []
    for stage in stages:
        found += [(("unshard", stage), data.unshard_program(stage)), (("reduce", stage), data.reduce_program(stage))]
    return [(key, program) for key, program in found if program is not None]


def _process_call(program: Program, groups: Mapping[str, str]) -> StepCall:
    call = _step_call(program, boxed_callable(program, groups))
    return replace(call, pausing=pausing_callable(program, groups, is_wait) if call.collectives else None)


def _step_call(program: Program, call: Any) -> StepCall:
    fakes = [meta.tensor(node) for node in program.placeholders]
    inputs = tuple((tuple(map(int, fake.shape)), fake.dtype) for fake in fakes if fake is not None)
    return StepCall(call, inputs, collectives_of(program))


@dataclass
class _Meeting:
    """One step program, called by every virtual data rank: the last to come runs it for all."""

    program: Program
    ranks: int
    axis: str
    boxes: dict[int, list[Any]] = field(default_factory=dict)
    results: dict[int, Sequence[Any]] = field(default_factory=dict)

    def of(self, rank: int) -> Any:
        def call(box: list[Any]) -> Sequence[Any] | None:
            if rank in self.results:
                return self.results.pop(rank)
            if rank not in self.boxes:
                self.boxes[rank] = box
            if len(self.boxes) == self.ranks:
                boxes = [self.boxes.pop(each) for each in range(self.ranks)]
                self.results = dict(enumerate(lockstep(self.program, self.axis, boxes)))
                return self.results.pop(rank)
            return None

        return call
