"""Lower a schedule and the stages of each microbatch to the rank program of one rank."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from graphcomp.dataparallel.step import DataParallel
from graphcomp.errors import ScheduleError, VerifyError
from graphcomp.ir.program import Program
from graphcomp.ir.signature import (
    Activation,
    BatchLeaf,
    Buffer,
    BufferUpdate,
    Constant,
    Grad,
    Loss,
    Metric,
    Output,
    Param,
    Role,
    Saved,
    Seed,
    Shard,
    Size,
    Statistic,
)
from graphcomp.ir.spelling import Symbols
from graphcomp.partition.accumulating import accumulated
from graphcomp.partition.stages import Boundary, Partitioned
from graphcomp.runtime.program.instructions import (
    BeginGradients,
    Bind,
    Edge,
    FinishSend,
    FinishSends,
    Form,
    HandOver,
    Instruction,
    PassBuffers,
    PostReceive,
    RankProgram,
    Record,
    Reduce,
    Run,
    RunKind,
    Send,
    Unshard,
    UpdateBuffer,
    WaitReceive,
)
from graphcomp.runtime.program.lifetimes import with_frees
from graphcomp.runtime.program.order import Do, arrange, arrivals, edge_of
from graphcomp.runtime.program.reduce_shared import SharedLowering, shared_gradients
from graphcomp.runtime.program.reductions import Part, early_stages, reductions
from graphcomp.schedule.actions import Action, Kind
from graphcomp.schedule.schedule import Schedule

_KINDS: dict[Kind, RunKind] = {Kind.F: "forward", Kind.B: "backward", Kind.FB: "fused"}
_Key = tuple[object, ...]


def distinct(specialisations: Sequence[Partitioned]) -> tuple[Partitioned, ...]:
    """Each specialisation once, in order of first appearance: rank programs number them like this."""
    return tuple({id(one): one for one in specialisations}.values())


def lower(
    specialisations: Sequence[Partitioned],
    schedule: Schedule,
    rank: int,
    outputs: bool = False,
    data: DataParallel | None = None,
    data_rank: int = 0,
) -> RankProgram:
    """The rank program of `rank`.

    specialisations: one a microbatch. schedule: with its transfers, and with whatever is to be fused, fused.
    outputs: keep the model's own outputs. data: what to do over data ranks, if there are several, of which
    this one is `data_rank`. Raises ScheduleError if schedule and specialisations do not belong together.
    """
    stages = {len(one.stages) for one in specialisations} or {schedule.stages}
    if len(specialisations) != schedule.microbatches or stages != {schedule.stages}:
        raise ScheduleError(
            "the schedule was not built for these microbatches",
            where=f"schedule {schedule.name!r}",
            expected=f"{len(specialisations)} microbatches, {sorted(stages)} stages",
            got=f"{schedule.microbatches} microbatches, {schedule.stages} stages",
        )
    if not schedule.has_transfers:
        raise ScheduleError(
            "the schedule has no transfers yet", where=f"schedule {schedule.name!r}", do="use with_transfers"
        )
    return _Lowering(tuple(specialisations), schedule, rank, outputs, data, data_rank).program()


def boundary_of(specialisations: Sequence[Partitioned], action: Action, edge: Edge) -> Boundary:
    """What a transfer carries for its microbatch; nothing where the specialisation has no such boundary."""
    cut = specialisations[action.microbatch]
    found = cut.forward_boundaries if edge.source < edge.target else cut.backward_boundaries
    return found.get(edge.source) or Boundary(edge.source, edge.target, ())


def exists(specialisations: Sequence[Partitioned], action: Action) -> bool:
    """Whether the action has anything to do: its boundary carries values, its stage has that program."""
    if action.kind.is_transfer:
        return bool(boundary_of(specialisations, action, edge_of(action)).values)
    if action.kind not in _KINDS:
        raise ScheduleError(f"action {action} cannot be lowered", expected=", ".join(k.value for k in _KINDS))
    return action.kind is not Kind.B or specialisations[action.microbatch].stages[action.stage].backward is not None


def traffic(specialisations: Sequence[Partitioned], schedule: Schedule, data: DataParallel | None) -> Hashable:
    """What the transfers of all ranks, and their order, depend on besides the schedule: equal for equal orders."""
    shared = shared_gradients(specialisations, schedule, data)
    each = {id(cut): _crossing(cut) for cut in distinct(specialisations)}
    closing = tuple((one.name, one.holders, one.sources) for one in shared)
    return tuple(each[id(cut)] for cut in specialisations), closing


def _crossing(cut: Partitioned) -> Hashable:
    """Which stages send for a microbatch, in either direction, and which have a backward."""
    edges = [
        (source for source, one in found.items() if one.values)
        for found in (cut.forward_boundaries, cut.backward_boundaries)
    ]
    return (*map(frozenset, edges), tuple(stage.backward is not None for stage in cut.stages))


@dataclass
class _Lowering:
    specialisations: tuple[Partitioned, ...]
    schedule: Schedule
    rank: int
    outputs: bool
    data: DataParallel | None
    data_rank: int
    registers: dict[_Key, int] = field(default_factory=dict)
    binds: list[Bind] = field(default_factory=list)
    instructions: list[Instruction] = field(default_factory=list)
    gradients: dict[tuple[int, str], int] = field(default_factory=dict)
    started: set[int] = field(default_factory=set)
    records: list[tuple[int, Role]] = field(default_factory=list)
    slots: dict[object, int] = field(default_factory=dict)
    # What a stage's buffers hold now, and what they held when the forward of a microbatch began.
    buffers: dict[tuple[int, str], int] = field(default_factory=dict)
    before: dict[tuple[int, int], dict[tuple[int, str], int]] = field(default_factory=dict)
    # Records of the last run, and reductions: behind its sends, for which another rank waits.
    later: list[Instruction] = field(default_factory=list)
    count: int = 0

    def program(self) -> RankProgram:
        self.numbers = {id(one): number for number, one in enumerate(distinct(self.specialisations))}
        self.symbols = {id(one): Symbols(one.joint.program) for one in distinct(self.specialisations)}
        if self.data is not None and not self.data.regather:
            for stage in self.schedule.stages_of(self.rank):
                self.unshard(stage)
        proven = arrivals(self.schedule, self.rank, self.exists)
        events = arrange(self.schedule.ranks[self.rank], self.exists)
        stages = self.schedule.stages_of(self.rank)
        self.early = early_stages(self.data, stages) if self.data is not None else []
        beside, left = reductions(self.early, [event.action for event in events if event.do is Do.RUN])
        for event in events:
            if event.do is not Do.SEND:
                self.flush()
            match event.do:
                case Do.POST:
                    self.post(event.action)
                case Do.WAIT:
                    self.wait(event.action)
                    for send in proven.get(event.action, ()):
                        edge = self.boundary(send)
                        self.instructions.append(FinishSend(edge[0], send.microbatch, self.slots[send]))
                case Do.RUN:
                    self.run(event.action)
                    self.later += [self.reduce(part) for part in beside.get(event.action, ())]
                case Do.SEND:
                    self.send(event.action)
        self.later += map(self.reduce, left)
        self.flush()
        self.finish()
        lasting = {bind.register for bind in self.binds if bind.microbatch is None}
        return RankProgram(
            rank=self.rank,
            ranks=len(self.schedule.ranks),
            stages=self.schedule.stages_of(self.rank),
            microbatches=self.schedule.microbatches,
            registers=self.count,
            slots=len(self.slots),
            binds=tuple(sorted(self.binds, key=lambda bind: bind.register)),
            instructions=tuple(with_frees(self.instructions, lasting, [bind.register for bind in self.binds])),
            gradients=tuple(self.gradients),
            records=tuple(self.records),
        )

    def exists(self, action: Action) -> bool:
        return exists(self.specialisations, action)

    def stage_program(self, action: Action) -> Program | None:
        stage = self.specialisations[action.microbatch].stages[action.stage]
        match action.kind:
            case Kind.F:
                return stage.forward
            case Kind.B:
                return stage.backward
            case _:
                return stage.fused

    def boundary(self, action: Action) -> tuple[Edge, Boundary]:
        edge = edge_of(action)
        return edge, boundary_of(self.specialisations, action, edge)

    def flush(self) -> None:
        self.instructions += self.later
        self.later = []

    def new(self) -> int:
        self.count += 1
        return self.count - 1

    def slot(self, key: object) -> int:
        return self.slots.setdefault(key, len(self.slots))

    def post(self, action: Action) -> None:
        edge, boundary = self.boundary(action)
        self.instructions.append(PostReceive(edge, action.microbatch, boundary.values, self.slot(action)))

    def wait(self, action: Action) -> None:
        edge, boundary = self.boundary(action)
        results = []
        for index in range(len(boundary.values)):
            results.append(self.new())
            self.registers[action.microbatch, Activation(edge.source, edge.target, index)] = results[-1]
        self.instructions.append(WaitReceive(edge, action.microbatch, self.slot(action), tuple(results)))

    def send(self, action: Action) -> None:
        edge, boundary = self.boundary(action)
        roles = [Activation(edge.source, edge.target, index) for index in range(len(boundary.values))]
        arguments = tuple(self.known((action.microbatch, role), action, role) for role in roles)
        self.instructions.append(Send(edge, action.microbatch, boundary.values, arguments, self.slot(action)))

    def run(self, action: Action) -> None:
        program = self.stage_program(action)
        if program is None:
            raise ScheduleError(
                f"action {action} fuses what cannot be fused: the backward waits for a later stage",
                where=f"schedule {self.schedule.name!r}, rank {self.rank}",
                do="insert the transfers before fusing",
            )
        if action.kind is not Kind.B:
            self.before[action.stage, action.microbatch] = dict(self.buffers)
        if self.data is not None and self.data.regather:
            self.unshard(action.stage)
        self.call(program, action, _KINDS[action.kind])

    def call(self, program: Program, action: Action, kind: RunKind) -> None:
        stage, microbatch = action.stage, action.microbatch
        arguments = tuple(self.argument(role, action) for role in program.inputs)
        results: list[int | None] = []
        recorded: list[tuple[Role, int]] = []
        handed: dict[Edge, list[Activation]] = {}
        for role, node in program.output_items():
            register = None if node is None or isinstance(role, Grad) else self.new()
            results.append(register)
            if register is None:
                continue
            match role:
                case Activation():
                    self.registers[microbatch, role] = register
                    if self.schedule.rank_of(role.target) == self.rank:
                        handed.setdefault(Edge(role.source, role.target), []).append(role)
                case Saved() | Statistic():
                    self.registers[microbatch, stage, role] = register
                case BufferUpdate(name):
                    self.buffers[stage, name] = register
                case Loss() | Metric():
                    recorded.append((role, register))
                case Output() if self.outputs:
                    recorded.append((role, register))
        self.instructions.append(
            Run(
                stage,
                kind,
                microbatch,
                self.numbers[id(self.specialisations[microbatch])],
                arguments,
                tuple(results),
                gradients=self.accumulators(program, action),
            )
        )
        for edge, roles in handed.items():
            self.hand_over(edge, microbatch, roles)
        if recorded:
            start = len(self.records)
            self.records += [(microbatch, role) for role, _ in recorded]
            items = tuple((start + place, register) for place, (_, register) in enumerate(recorded))
            self.later.append(Record(microbatch, items, tuple(role for role, _ in recorded)))

    def hand_over(self, edge: Edge, microbatch: int, roles: Sequence[Activation]) -> None:
        given = tuple(self.registers[microbatch, role] for role in roles)
        self.registers |= {(microbatch, role): self.new() for role in roles}
        taken = tuple(self.registers[microbatch, role] for role in roles)
        self.instructions.append(HandOver(edge, microbatch, given, taken))

    def accumulators(self, program: Program, action: Action) -> tuple[int, ...]:
        """Those that a run of the program adds to; the ones that are new begin at zero."""
        names, cut = accumulated(program), self.specialisations[action.microbatch]
        slots = tuple(self.gradients.setdefault((action.stage, name), len(self.gradients)) for name in names)
        new = {slot: cut.accumulator(name) for slot, name in zip(slots, names, strict=True) if slot not in self.started}
        if new:
            forms = tuple(Form(tuple(p.shape), tuple(p.stride()), p.dtype) for p in new.values())
            self.instructions.append(BeginGradients(tuple(new), forms))
            self.started |= new.keys()
        return slots

    def unshard(self, stage: int) -> None:
        """Whole parameters from the shards; they live until their last use, in any of the rank's stages."""
        if self.data is None or not self.data.gathered_on(stage):
            return
        names = self.data.gathered_on(stage)
        users = (stage,) if self.data.regather else self.schedule.stages_of(self.rank)
        shards = tuple(self.bound((Shard(name),), Shard(name)) for name in names)
        whole = tuple(self.new() for _ in names)
        for name, register in zip(names, whole, strict=True):
            self.registers |= {(user, Param(name)): register for user in users if user in self.data.homes[name]}
        self.instructions.append(Unshard(stage, shards, whole))

    def argument(self, role: Role, action: Action) -> int:
        stage, microbatch = action.stage, action.microbatch
        match role:
            case Param(name) if self.data is not None and name in self.data.sharded:
                return self.known((stage, role), action, role)
            case Activation():
                return self.known((microbatch, role), action, role)
            case Saved() | Statistic():
                return self.known((microbatch, stage, role), action, role)
            case Buffer(name) if (stage, name) in self.before.get((stage, microbatch), {}):
                return self.before[stage, microbatch][stage, name]
            case BatchLeaf() | Size() | Seed():
                return self.bound((microbatch, role), role, microbatch=microbatch)
            case Constant():
                number = self.numbers[id(self.specialisations[microbatch])]
                return self.bound((number, role), role, specialisation=number)
            case _:
                return self.bound((role,), role)

    def known(self, key: _Key, action: Action, role: Role) -> int:
        if key not in self.registers:
            raise VerifyError(
                f"'{role}' is needed and nothing computes or receives it before",
                where=f"rank {self.rank}, action {action}",
            )
        return self.registers[key]

    def bound(self, key: _Key, role: Role, microbatch: int | None = None, specialisation: int | None = None) -> int:
        if key not in self.registers:
            self.registers[key] = self.new()
            shown = None if microbatch is None else self.symbols[id(self.specialisations[microbatch])].role(role)
            self.binds.append(Bind(self.registers[key], role, microbatch, specialisation, shown))
        return self.registers[key]

    def update(self, stage: int) -> None:
        """The updates of all microbatches, when those of the data ranks before this one have been made."""
        turns = self.data.turns_on(stage) if self.data is not None else ()
        own = [(m, p) for m, cut in enumerate(self.specialisations) if (p := cut.stages[stage].update) is not None]
        if own and min(turns, default=self.data_rank) < self.data_rank:
            self.pass_buffers(stage, "take")
        for microbatch, program in own:
            self.before[stage, microbatch] = dict(self.buffers)
            self.call(program, Action(stage, Kind.F, microbatch), "update")
        if turns:
            self.pass_buffers(stage, "pass")

    def pass_buffers(self, stage: int, kind: Literal["take", "pass"]) -> None:
        names = self.data.updated_on(stage) if self.data is not None else ()
        keys = [(stage, name) for name in names]
        given = [
            self.buffers[key] if key in self.buffers else self.bound((Buffer(key[1]),), Buffer(key[1])) for key in keys
        ]
        taken = [self.new() for _ in names]
        self.buffers |= zip(keys, taken, strict=True)
        self.instructions.append(PassBuffers(stage, kind, tuple(given), tuple(taken)))

    def finish(self) -> None:
        for stage in self.schedule.stages_of(self.rank):
            self.update(stage)
        for (stage, name), register in self.buffers.items():
            self.instructions.append(UpdateBuffer(stage, name, register))
        shared = shared_gradients(self.specialisations, self.schedule, self.data)
        lowering = SharedLowering(self.rank, self.schedule, self.gradients, self.new, self.slot)
        for one in shared:
            self.instructions += lowering.gather_shares(one)
        for stage in self.schedule.stages_of(self.rank):
            if self.data is not None and self.data.reduced_on(stage) and stage not in self.early:
                self.instructions.append(self.reduce(Part(stage)))
        for one in shared:
            self.instructions += lowering.spread_sum(one)
        if any(isinstance(step, Send) for step in self.instructions) or any(one.crosses for one in shared):
            self.instructions.append(FinishSends())

    def reduce(self, part: Part) -> Reduce:
        names = self.data.reduced_on(part.stage) if self.data is not None else ()
        slots = tuple(self.gradients.setdefault((part.stage, name), len(self.gradients)) for name in names)
        return Reduce(part.stage, slots, part.number, part.count)
