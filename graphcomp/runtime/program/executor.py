"""Execute a rank program.

The program is linked once: every instruction becomes a function of the step's state in which all indices
are already looked up. A step then walks over these functions. Nothing here reads a value back from the
device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from graphcomp.compat.profiler import is_recording, span
from graphcomp.errors import StepError
from graphcomp.ir.signature import Loss, Metric, Output, Role
from graphcomp.partition.stages import Partitioned
from graphcomp.runtime.program.finite import FiniteWatch
from graphcomp.runtime.program.inputs import StepInputs, link_binds
from graphcomp.runtime.program.instructions import (
    FinishSends,
    Instruction,
    PassBuffers,
    PostReceive,
    RankProgram,
    Reduce,
    Run,
    Send,
    SendGradient,
    Unshard,
    WaitReceive,
)
from graphcomp.runtime.program.link import Callables, Context, Operation, State, StepCalls, StepKind, link
from graphcomp.runtime.program.transport import Transport
from graphcomp.schedule import named_stages


@dataclass(frozen=True)
class RankResult:
    """What a rank's part of a step yields. Nothing of it has been written to parameters or buffers yet.

    gradients: by stage, then by parameter; absent where no microbatch yields one. buffers: new values by
    name. records: (microbatch, role) of losses, metrics and outputs, as the program has them; values: of each.
    """

    microbatches: int
    gradients: Mapping[int, Mapping[str, torch.Tensor]]
    buffers: Mapping[str, torch.Tensor]
    records: Sequence[tuple[int, Role]] = field(repr=False)
    values: Sequence[torch.Tensor] = field(repr=False)
    messages: int
    bytes_sent: int
    collectives: int = 0

    def recorded(self, kind: type[Loss] | type[Metric] | type[Output]) -> list[dict[str, torch.Tensor]]:
        """One dictionary a microbatch: losses or metrics by name, outputs by path."""
        found: list[dict[str, torch.Tensor]] = [{} for _ in range(self.microbatches)]
        for (microbatch, role), value in zip(self.records, self.values, strict=True):
            if isinstance(role, kind):
                found[microbatch][role.path if isinstance(role, Output) else role.name] = value
        return found


class RankExecutor:
    """Runs one rank program any number of times.

    specialisations: as `lower` numbers them. callables: by (specialisation, stage, kind); called with one
    list, the inputs of that program in order, they return its outputs in order. What is in that list for
    the last time is in no other place of the runtime: it lives as long as the callee keeps it.
    accumulate_dtype: of the accumulated gradients; None: as they come. step_calls: the step programs that talk to the
    other data ranks. rank: what messages call it; None: its number in the pipeline. check_finite: look at what it
    computes, with `watch`.
    """

    def __init__(
        self,
        program: RankProgram,
        specialisations: Sequence[Partitioned],
        callables: Callables,
        transport: Transport,
        device: torch.device | str = "cpu",
        accumulate_dtype: torch.dtype | None = None,
        step_calls: StepCalls | None = None,
        rank: int | None = None,
        check_finite: bool = False,
    ) -> None:
        self.program, self.transport = program, transport
        self.watch = FiniteWatch(program, specialisations) if check_finite else None
        self.rank = program.rank if rank is None else rank
        calls = step_calls or {}
        context = Context(
            program, tuple(specialisations), callables, transport, torch.device(device), accumulate_dtype, calls
        )
        self.collectives = sum(calls[key].collectives for key in map(_step_call_of, program.instructions) if key)
        self._operations = [self._link(instruction, context) for instruction in program.instructions]
        self._spans: list[Operation] = []
        self._gradients: dict[int, list[tuple[str, int]]] = {stage: [] for stage in program.stages}
        for slot, (stage, name) in enumerate(program.gradients):
            self._gradients[stage].append((name, slot))
        self._fill = link_binds(program, context.specialisations)
        self._state: State | None = None
        self._next = 0

    def _link(self, instruction: Instruction, context: Context) -> Operation:
        operation = link(instruction, context)
        if self.watch is None or not isinstance(instruction, Run):
            return operation
        return self.watch.wrapped(instruction, operation)

    def drop(self) -> None:
        """Give up a step that failed, with all that it holds."""
        self._state = None

    def begin(self, inputs: StepInputs) -> None:
        """Take the inputs of a step; whatever an earlier step left behind is dropped."""
        if len(inputs.microbatches) != self.program.microbatches:
            raise StepError(
                "a rank program was given another number of microbatches",
                where=f"rank {self.program.rank}",
                expected=self.program.microbatches,
                got=len(inputs.microbatches),
            )
        self._state = State(
            registers=[None] * self.program.registers,
            slots=[None] * self.program.slots,
            gradients=[None] * len(self.program.gradients),
            records=[None] * len(self.program.records),
            parameters=inputs.parameters,
        )
        self._fill(self._state, inputs)
        self._next = 0
        if self.watch is not None:
            self.watch.clear()
        self.transport.reset()

    def advance(self) -> bool:
        """Go on until the end (True) or until another virtual rank has to go on first (False).

        An exception keeps its type and gets a note with rank, stage, microbatch and action.
        """
        state, operations = self._running(), self._to_run()
        place, end = self._next, len(operations)
        try:
            with torch.no_grad():
                while place < end:
                    if operations[place](state):
                        return False
                    place += 1
        except BaseException as error:
            error.add_note(self._where(self.program.instructions[place]))
            raise
        finally:
            self._next = place
        return True

    def _to_run(self) -> list[Operation]:
        """The operations; while a profiler records, each in a range of its own. So nothing is asked for one by one."""
        if not is_recording():
            return self._operations
        if not self._spans:
            steps = zip(self._operations, self.program.instructions, strict=True)
            self._spans = [_in_span(operation, span_name(step)) for operation, step in steps]
        return self._spans

    @property
    def progress(self) -> int:
        """How many instructions are done."""
        return self._next

    @property
    def current(self) -> str:
        """The text of the next instruction."""
        done = self._next >= len(self._operations)
        return "the end" if done else str(self.program.instructions[self._next])

    def run(self, inputs: StepInputs) -> RankResult:
        """One step of this rank. Raises StepError if the transport is virtual and another rank has to go on
        first.
        """
        self.begin(inputs)
        if not self.advance():
            raise StepError("a virtual rank cannot run alone", where=f"rank {self.program.rank}: {self.current}")
        return self.result()

    def result(self) -> RankResult:
        """What the step yielded; hands it over, so it can be asked for once."""
        state = self._running()
        if self._next < len(self._operations):
            raise StepError("a rank has not come to its end", where=f"rank {self.program.rank}: {self.current}")
        sums = state.gradients
        gradients = {
            stage: {name: value for name, slot in own if (value := sums[slot]) is not None}
            for stage, own in self._gradients.items()
        }
        if self.watch is not None:
            for stage, own in gradients.items():
                self.watch.ending(stage, own)
        self._state = None
        return RankResult(
            microbatches=self.program.microbatches,
            gradients=gradients,
            buffers=state.buffers,
            records=self.program.records,
            values=state.records,
            messages=self.transport.messages,
            bytes_sent=self.transport.bytes_sent,
            collectives=self.collectives,
        )

    def _running(self) -> State:
        if self._state is None:
            raise StepError("no step has begun", where=f"rank {self.program.rank}", do="call begin(inputs) first")
        return self._state

    def _where(self, instruction: Instruction) -> str:
        if isinstance(instruction, Run):
            place = f"microbatch {instruction.microbatch}, action {instruction.action}"
            return f"in rank {self.rank}, stage {instruction.stage}, {place}"
        return f"in rank {self.rank}, {named_stages(self.program.stages)}, at: {instruction}"


def _step_call_of(instruction: Instruction) -> tuple[StepKind, int] | None:
    """What an instruction does together with the other data ranks."""
    match instruction:
        case Unshard(stage):
            return "unshard", stage
        case Reduce(stage, _, 0):
            return "reduce", stage
        case PassBuffers(stage, kind):
            return kind, stage
    return None


def span_name(instruction: Instruction) -> str | None:
    """What an instruction is called in the trace of a profiler; None for one that only moves references about."""
    match instruction:
        case Run(stage, kind, microbatch):
            return f"graphcomp: stage {stage} microbatch {microbatch} {kind}"
        case Unshard(stage):
            return f"graphcomp: stage {stage} unshard"
        case Reduce(stage):
            return f"graphcomp: stage {stage} reduce"
        case PassBuffers(stage, kind):
            return f"graphcomp: stage {stage} {kind} buffers"
        case PostReceive(edge, microbatch) | Send(edge, microbatch) | WaitReceive(edge, microbatch):
            verb = {PostReceive: "post receive", Send: "send", WaitReceive: "wait"}[type(instruction)]
            return f"graphcomp: {verb} {edge}" + ("" if microbatch is None else f" microbatch {microbatch}")
        case SendGradient(edge):
            return f"graphcomp: send {edge} shared gradient"
        case FinishSends():
            return "graphcomp: finish sends"
    return None


def _in_span(operation: Operation, name: str | None) -> Operation:
    if name is None:
        return operation

    def named(state: State) -> object:
        with span(name):
            return operation(state)

    return named


def run_virtual_ranks(executors: Sequence[RankExecutor]) -> list[RankResult]:
    """Let virtual ranks, each with its inputs given, go on in turn until all are done; results in order of
    ranks.

    Raises StepError, with what each rank waits for, if none can go on.
    """
    waiting = list(executors)
    while waiting:
        before = [executor.progress for executor in waiting]
        left = [executor for executor in waiting if not executor.advance()]
        if left and before == [executor.progress for executor in waiting]:
            blocked = "; ".join(f"rank {one.program.rank} at: {one.current}" for one in left)
            raise StepError("the virtual ranks wait for each other", got=blocked)
        waiting = left
    return [executor.result() for executor in executors]
