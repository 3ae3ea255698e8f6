"""Turn each instruction into a function of the step's state. Every index, shape function and callee is
looked up here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from typing import Any, Literal

import sympy
import torch

from graphcomp.compat.zeros import zero_all
from graphcomp.errors import AgreementError, VerifyError
from graphcomp.ir.sizes import evaluator
from graphcomp.partition.stages import Carried, Partitioned, sum_dtype
from graphcomp.runtime.program.instructions import (
    AddGradient,
    BeginGradients,
    Edge,
    FinishSend,
    FinishSends,
    Free,
    HandOver,
    Instruction,
    JoinGradient,
    PassBuffers,
    PostReceive,
    RankProgram,
    Record,
    Reduce,
    ReplaceGradient,
    Run,
    RunKind,
    Send,
    SendGradient,
    Unshard,
    UpdateBuffer,
    WaitReceive,
)
from graphcomp.runtime.program.transport import Transport, describe


@dataclass(slots=True)
class State:
    """All that changes during a step. slots: messages under way. pending: slots of unfinished sends, oldest
    first. entered: the current instruction has handed over its inputs, and waits. reducing: under way, in parts.
    """

    registers: list[Any]
    slots: list[Any]
    gradients: list[Any]
    records: list[Any]
    parameters: Mapping[str, torch.Tensor]
    sizes: Sequence[Mapping[str, int]] = ()
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    pending: deque[int] = field(default_factory=deque)
    entered: bool = False
    reducing: Generator[None, None, Sequence[Any]] | None = None


Callables = Mapping[tuple[int, int, RunKind], Callable[[list[Any]], Sequence[Any]]]
"""By (specialisation, stage, kind): a stage program as a function of one list, which it empties."""


@dataclass(frozen=True)
class StepCall:
    """A step program of a stage, or its buffers' way from hand to hand, made callable. inputs: shape and dtype of each,
    where it is not called with what there is.

    call: of one list, which it takes over and empties; None while other virtual ranks have still to come to it: then
    it is called again, with an empty list. collectives: how many it issues. pausing: the same, as a generator that
    stops before it waits for each of them; None for virtual ranks, which meet to run it as a whole.
    """

    call: Callable[[list[Any]], Sequence[Any] | None]
    inputs: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    collectives: int
    pausing: Callable[[list[Any]], Generator[None, None, Sequence[Any]]] | None = None


StepKind = Literal["unshard", "reduce", "take", "pass"]
StepCalls = Mapping[tuple[StepKind, int], StepCall]
"""By (kind, stage)."""

Operation = Callable[[State], object]
"""Returns something true only if it could not be done yet; then it is called again, as often as needed."""


@dataclass(frozen=True)
class Context:
    """What linking needs to know."""

    program: RankProgram
    specialisations: tuple[Partitioned, ...]
    callables: Callables
    transport: Transport
    device: torch.device
    accumulate_dtype: torch.dtype | None
    step_calls: StepCalls = field(default_factory=dict)
    shapes: dict[int, tuple[list[str], list[Callable[..., tuple[int, ...]]]]] = field(default_factory=dict)


def link(instruction: Instruction, context: Context) -> Operation:
    match instruction:
        case Run():
            return _run(instruction, context)
        case PostReceive():
            return _post(instruction, context)
        case WaitReceive():
            return _wait(instruction)
        case Send():
            return _send(instruction, context)
        case SendGradient():
            return _send_gradient(instruction, context)
        case FinishSend():
            return _finish(instruction)
        case FinishSends():
            return _finish_all
        case BeginGradients():
            return _begin(instruction, context)
        case AddGradient(gradient, register):
            return _add(gradient, register)
        case ReplaceGradient(gradient, register):
            return lambda state: state.gradients.__setitem__(gradient, state.registers[register])
        case JoinGradient(gradient, other, adds):
            return _join(gradient, other, adds)
        case HandOver():
            return _hand_over(instruction)
        case Unshard(stage):
            return _together(context.step_calls["unshard", stage], instruction)
        case PassBuffers(stage, kind):
            return _together(context.step_calls[kind, stage], instruction)
        case Reduce():
            return _reduce(instruction, context)
        case UpdateBuffer(_, name, register):
            return lambda state: state.buffers.__setitem__(name, state.registers[register])
        case Record():
            return _record(instruction)
        case Free(registers):
            return _free(registers)


def _run(run: Run, context: Context) -> Operation:
    key = (run.specialisation, run.stage, run.kind)
    if key not in context.callables:
        raise VerifyError(
            f"no callable for {run.kind} of stage {run.stage}, specialisation {run.specialisation}",
            got=sorted(context.callables),
        )
    call, frees = context.callables[key], run.frees
    arguments, accumulators = taken(run.arguments), taken(run.gradients)
    keep = [(register, place) for place, register in enumerate(run.results) if register is not None]

    def operation(state: State) -> None:
        registers = state.registers
        given = [*arguments(registers), *accumulators(state.gradients)]
        for register in frees:
            registers[register] = None
        results = call(given)
        for register, place in keep:
            registers[register] = results[place]

    return operation


def taken(places: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """A function that takes what stands at these places of a list: one call for all of them."""
    if len(places) < 2:
        return lambda found: [found[place] for place in places]
    return itemgetter(*places)


class _Shapes:
    """The values of a boundary for one microbatch: dtypes, devices, and shapes as a function of its sizes."""

    def __init__(self, values: tuple[Carried, ...], microbatch: int | None, context: Context, edge: Edge) -> None:
        self.values, self.microbatch, self.edge = values, microbatch, edge
        self.devices = [_device(value, context.device) for value in values]
        self.dtypes = [value.dtype for value in values]
        if microbatch is None and context.accumulate_dtype is not None:
            self.dtypes = [sum_dtype(dtype, context.accumulate_dtype) for dtype in self.dtypes]
        # One compilation for all microbatches. By identity: comparing expressions is slow.
        if id(values) not in context.shapes:
            context.shapes[id(values)] = _shape_functions(values)
        self.symbols, self.functions = context.shapes[id(values)]
        self.fixed = None if self.symbols else [function() for function in self.functions]

    def __call__(self, state: State) -> list[tuple[int, ...]]:
        if self.fixed is not None or self.microbatch is None:
            return self.fixed or []
        sizes = state.sizes[self.microbatch]
        given = [sizes[symbol] for symbol in self.symbols]
        return [function(*given) for function in self.functions]

    def check(self, tensors: Sequence[torch.Tensor], shapes: Sequence[tuple[int, ...]]) -> None:
        """Raise AgreementError unless the tensors are as planned: the receiver cannot notice."""
        for tensor, shape, dtype, value in zip(tensors, shapes, self.dtypes, self.values, strict=True):
            if tensor.shape != shape or tensor.dtype is not dtype:
                microbatch = "" if self.microbatch is None else f", microbatch {self.microbatch}"
                raise AgreementError(
                    f"value '{value.name}' is not what the plan says it is; it was not sent",
                    where=f"edge {self.edge}{microbatch}",
                    expected=describe(shape, dtype),
                    got=describe(tensor.shape, tensor.dtype),
                )


def _shape_functions(values: Sequence[Carried]) -> tuple[list[str], list[Callable[..., tuple[int, ...]]]]:
    free = {str(symbol) for value in values for size in value.shape for symbol in sympy.sympify(size).free_symbols}
    symbols = sorted(free)
    return symbols, [evaluator(value.shape, symbols) for value in values]


def _device(value: Carried, device: torch.device) -> torch.device:
    """Captured on meta or on the same type of device: wherever this rank works."""
    return device if value.device in ("meta", device.type) else torch.device(value.device)


def _post(post: PostReceive, context: Context) -> Operation:
    shapes, transport, slot = (
        _Shapes(post.values, post.microbatch, context, post.edge),
        context.transport,
        post.slot,
    )
    dtypes, devices, edge, microbatch = shapes.dtypes, shapes.devices, post.edge, post.microbatch

    def operation(state: State) -> None:
        buffers = [
            torch.empty(shape, dtype=dtype, device=device)
            for shape, dtype, device in zip(shapes(state), dtypes, devices, strict=True)
        ]
        state.slots[slot] = transport.post_receive(edge, microbatch, buffers)

    return operation


def _wait(wait: WaitReceive) -> Operation:
    slot = wait.slot
    keep = [(register, place) for place, register in enumerate(wait.results) if register is not None]

    def operation(state: State) -> bool:
        handle = state.slots[slot]
        if not handle.ready():
            return True
        values = handle.wait()
        state.slots[slot] = None
        for register, place in keep:
            state.registers[register] = values[place]
        return False

    return operation


def _send(send: Send, context: Context) -> Operation:
    shapes, transport, slot = (
        _Shapes(send.values, send.microbatch, context, send.edge),
        context.transport,
        send.slot,
    )
    edge, microbatch, arguments = send.edge, send.microbatch, send.arguments

    def operation(state: State) -> None:
        tensors = [state.registers[register] for register in arguments]
        shapes.check(tensors, shapes(state))
        _start(state, slot, transport.send(edge, microbatch, tensors))

    return operation


def _send_gradient(send: SendGradient, context: Context) -> Operation:
    shapes, transport, slot = _Shapes(send.values, None, context, send.edge), context.transport, send.slot
    edge, gradient = send.edge, send.gradient

    def operation(state: State) -> None:
        tensors = [state.gradients[gradient]]
        shapes.check(tensors, shapes(state))
        _start(state, slot, transport.send(edge, None, tensors))

    return operation


def _start(state: State, slot: int, handle: Any) -> None:
    """Keep a send; let go of the oldest ones that are known to be through."""
    slots, pending = state.slots, state.pending
    while pending and (slots[pending[0]] is None or slots[pending[0]].done()):
        slots[pending.popleft()] = None
    slots[slot] = handle
    pending.append(slot)


def _finish(finish: FinishSend) -> Operation:
    slot = finish.slot

    def operation(state: State) -> None:
        handle = state.slots[slot]
        if handle is not None:
            handle.wait()
            state.slots[slot] = None

    return operation


def _finish_all(state: State) -> None:
    while state.pending:
        handle = state.slots[state.pending.popleft()]
        if handle is not None:
            handle.wait()


def _begin(begin: BeginGradients, context: Context) -> Operation:
    dtype, device = context.accumulate_dtype, context.device
    made = [
        partial(torch.empty_strided, form.shape, form.strides, dtype=sum_dtype(form.dtype, dtype), device=device)
        for form in begin.forms
    ]

    def operation(state: State) -> None:
        sums = [make() for make in made]
        zero_all(sums)
        for slot, each in zip(begin.slots, sums, strict=True):
            state.gradients[slot] = each

    return operation


def _add(gradient: int, register: int) -> Operation:
    def operation(state: State) -> None:
        state.gradients[gradient].add_(state.registers[register])

    return operation


def _join(gradient: int, other: int, adds: bool) -> Operation:
    def operation(state: State) -> None:
        share = state.gradients[other]
        state.gradients[gradient] = state.gradients[gradient].add_(share) if adds else share

    return operation


def _hand_over(given: HandOver) -> Operation:
    each = [(x, register) for x, register in zip(given.arguments, given.results, strict=True) if register is not None]

    def operation(state: State) -> None:
        for argument, register in each:
            state.registers[register] = state.registers[argument].contiguous()

    return operation


def _together(step_call: StepCall, given: Unshard | PassBuffers) -> Operation:
    call, arguments = step_call.call, given.arguments
    keep = [(register, place) for place, register in enumerate(given.results) if register is not None]

    def operation(state: State) -> bool:
        box = [] if state.entered else [state.registers[register] for register in arguments]
        results = call(box)
        state.entered = results is None
        if results is None:
            return True
        for register, place in keep:
            state.registers[register] = results[place]
        return False

    return operation


def _reduce(reduce: Reduce, context: Context) -> Operation:
    step_call, slots, device = context.step_calls["reduce", reduce.stage], reduce.gradients, context.device

    def take(gradients: list[Any]) -> list[Any]:
        box = []
        for slot, (shape, dtype) in zip(slots, step_call.inputs, strict=True):
            gradient, gradients[slot] = gradients[slot], None  # so that it is freed once it is packed
            box.append(torch.zeros(shape, dtype=dtype, device=device) if gradient is None else gradient)
        return box

    def put(gradients: list[Any], results: Sequence[Any]) -> None:
        for slot, result in zip(slots, results, strict=True):
            gradients[slot] = result

    def whole(state: State) -> bool:
        results = step_call.call([] if state.entered else take(state.gradients))
        state.entered = results is None
        if results is None:
            return True
        put(state.gradients, results)
        return False

    pausing, part, parts = step_call.pausing, reduce.part, reduce.parts
    if pausing is None or parts == 1:
        return whole if part == parts - 1 else lambda _: False
    waits = step_call.collectives
    begun, due = (0 if n < 0 else 1 + waits * n // (parts - 1) for n in (part - 1, part))

    def one_part(state: State) -> None:
        if part == 0:
            state.reducing = pausing(take(state.gradients))
        running = state.reducing
        if running is None:
            raise VerifyError(f"part {part + 1} of a reduction comes before its first", where=f"stage {reduce.stage}")
        try:
            for _ in range(begun, due):
                next(running)
        except StopIteration as end:
            state.reducing = None
            put(state.gradients, end.value)

    return one_part


def _record(record: Record) -> Operation:
    items = record.items

    def operation(state: State) -> None:
        for place, register in items:
            state.records[place] = state.registers[register]

    return operation


def _free(registers: tuple[int, ...]) -> Operation:
    def operation(state: State) -> None:
        for register in registers:
            state.registers[register] = None

    return operation
