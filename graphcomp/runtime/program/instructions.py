"""The rank program: what one rank does in a step, a straight line of instructions on numbered registers.

Each register is written once. A register is emptied at its last use: by the `Run` that takes it (so that
the callee holds the only reference) or by a `Free`. The text is the same on every run and every rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch

from graphcomp.ir.signature import Role
from graphcomp.partition.stages import Carried
from graphcomp.schedule import named_stages

RunKind = Literal["forward", "backward", "fused", "update"]
ACTION_TEXT: dict[str, str] = {"forward": "F", "backward": "B", "fused": "FB", "update": "U"}


@dataclass(frozen=True, slots=True)
class Edge:
    """The way of values: from stage `source` to stage `target`; target < source carries gradients."""

    source: int
    target: int

    def __str__(self) -> str:
        return f"{self.source}>{self.target}"


@dataclass(frozen=True)
class Bind:
    """Before the first instruction: put an input of the step into a register.

    microbatch: None for what all microbatches share. specialisation: for a `Constant`, whose programs it
    belongs to. shown: the role as texts name it; None: as it is.
    """

    register: int
    role: Role
    microbatch: int | None = None
    specialisation: int | None = None
    shown: Role | None = None

    def __str__(self) -> str:
        place = "" if self.microbatch is None else f" of microbatch {self.microbatch}"
        return f"{_names([self.register])} = {self.shown or self.role}{place}"


@dataclass(frozen=True)
class PostReceive:
    """Allocate buffers for a message and start to receive it. `values` have shapes over the microbatch's
    own sizes.
    """

    edge: Edge
    microbatch: int | None
    values: tuple[Carried, ...]
    slot: int

    def __str__(self) -> str:
        return f"post {_message(self.edge, self.microbatch)}"


@dataclass(frozen=True)
class WaitReceive:
    """Wait for a posted message. A result of None is a value nobody reads."""

    edge: Edge
    microbatch: int | None
    slot: int
    results: tuple[int | None, ...]

    def __str__(self) -> str:
        return f"{_names(self.results)} = wait {_message(self.edge, self.microbatch)}"


@dataclass(frozen=True)
class Run:
    """Call a stage's program. `frees` are emptied before the call; a result of None is dropped at once.

    gradients: the accumulators that it adds to, in the order of the program's gradients.
    """

    stage: int
    kind: RunKind
    microbatch: int
    specialisation: int
    arguments: tuple[int, ...]
    results: tuple[int | None, ...]
    frees: tuple[int, ...] = ()
    gradients: tuple[int, ...] = ()

    @property
    def action(self) -> str:
        """The schedule's text for it, such as `1F0`; `U` for updates of buffers, which no schedule has."""
        return f"{self.stage}{ACTION_TEXT[self.kind]}{self.microbatch}"

    def __str__(self) -> str:
        results = f"{_names(self.results)} = " if self.results else ""
        variant = f" #{self.specialisation}" if self.specialisation else ""
        adds = f" adding to {_slots(self.gradients)}" if self.gradients else ""
        frees = f" free {_names(self.frees)}" if self.frees else ""
        return f"{results}run {self.action}{variant}({_names(self.arguments)}){adds}{frees}"


@dataclass(frozen=True)
class Send:
    """Start to send registers; the memory is kept until the send is finished."""

    edge: Edge
    microbatch: int | None
    values: tuple[Carried, ...]
    arguments: tuple[int, ...]
    slot: int

    def __str__(self) -> str:
        return f"send {_message(self.edge, self.microbatch)} ({_names(self.arguments)})"


@dataclass(frozen=True)
class FinishSend:
    """Release what a send keeps, at a place where the peer is known to have received it: this waits for
    nothing.
    """

    edge: Edge
    microbatch: int | None
    slot: int

    def __str__(self) -> str:
        return f"finish send {_message(self.edge, self.microbatch)}"


@dataclass(frozen=True)
class FinishSends:
    """Wait for all sends that are still under way."""

    def __str__(self) -> str:
        return "finish sends"


@dataclass(frozen=True)
class Form:
    """What an accumulator looks like; a dtype that the plan asks for takes the place of this one."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class BeginGradients:
    """Accumulators that start at zero."""

    slots: tuple[int, ...]
    forms: tuple[Form, ...]

    def __str__(self) -> str:
        return f"begin {_slots(self.slots)}"


@dataclass(frozen=True)
class AddGradient:
    """Add what another stage has sent to an accumulator, in place."""

    gradient: int
    register: int

    def __str__(self) -> str:
        return f"add g{self.gradient} += %{self.register}"


@dataclass(frozen=True)
class SendGradient:
    """Start to send an accumulated gradient of a shared parameter to another stage that holds it."""

    edge: Edge
    gradient: int
    values: tuple[Carried, ...]
    slot: int

    def __str__(self) -> str:
        return f"send {self.edge} (g{self.gradient})"


@dataclass(frozen=True)
class ReplaceGradient:
    """Take the sum of all stages as the gradient of a shared parameter."""

    gradient: int
    register: int

    def __str__(self) -> str:
        return f"replace g{self.gradient} = %{self.register}"


@dataclass(frozen=True)
class JoinGradient:
    """Add the gradient that another stage of this rank has of a shared parameter; or, without `adds`, take it over."""

    gradient: int
    other: int
    adds: bool

    def __str__(self) -> str:
        return f"add g{self.gradient} += g{self.other}" if self.adds else f"replace g{self.gradient} = g{self.other}"


@dataclass(frozen=True)
class HandOver:
    """Values for the next stage, which is on this rank too: as dense as they would arrive in a message."""

    edge: Edge
    microbatch: int
    arguments: tuple[int, ...]
    results: tuple[int | None, ...]

    def __str__(self) -> str:
        return f"{_names(self.results)} = hand over {_message(self.edge, self.microbatch)} ({_names(self.arguments)})"


@dataclass(frozen=True)
class Unshard:
    """Gather a stage's sharded parameters from the data ranks. arguments: their shards; results: whole parameters, in
    the order of the stage's unshard program; None: not used here, but gathered all the same, as all data ranks must.
    """

    stage: int
    arguments: tuple[int, ...]
    results: tuple[int | None, ...]

    def __str__(self) -> str:
        return f"{_names(self.results)} = unshard stage {self.stage} ({_names(self.arguments)})"


@dataclass(frozen=True)
class Reduce:
    """Sum a stage's accumulated gradients over the data ranks, each in its place.

    gradients: accumulators, in the order of the stage's reduce program; one that this rank has nothing in counts zero.
    part, parts: the program is run in so many parts, and this is one of them: the first begins collectives, each of the
    others waits for its share of them, and begins more. So what stands between them overlaps.
    """

    stage: int
    gradients: tuple[int, ...]
    part: int = 0
    parts: int = 1

    def __str__(self) -> str:
        part = f", part {self.part + 1} of {self.parts}" if self.parts > 1 else ""
        return f"reduce stage {self.stage}{part} ({_slots(self.gradients)})"


@dataclass(frozen=True)
class PassBuffers:
    """Let the buffers of a stage, which data ranks update in turn, go from hand to hand.

    kind: "take": get what the data ranks before this one have made of them. "pass": give on what this one has made of
    them, if it updates any, and get what the last one does. arguments: the buffers as this rank has them; results: in
    the same order.
    """

    stage: int
    kind: Literal["take", "pass"]
    arguments: tuple[int, ...]
    results: tuple[int | None, ...]

    def __str__(self) -> str:
        return f"{_names(self.results)} = {self.kind} buffers of stage {self.stage} ({_names(self.arguments)})"


@dataclass(frozen=True)
class UpdateBuffer:
    """What a buffer holds after the step. The caller commits it once the whole step has succeeded."""

    stage: int
    name: str
    register: int

    def __str__(self) -> str:
        return f"update {self.name} = %{self.register}"


@dataclass(frozen=True)
class Record:
    """Keep losses, metrics and outputs of a microbatch for the result: `items` are (place in `records`,
    register).
    """

    microbatch: int
    items: tuple[tuple[int, int], ...]
    roles: tuple[Role, ...]

    def __str__(self) -> str:
        texts = [f"{role} = %{register}" for role, (_, register) in zip(self.roles, self.items, strict=True)]
        return f"record {', '.join(texts)}"


@dataclass(frozen=True)
class Free:
    """Empty registers after their last use."""

    registers: tuple[int, ...]

    def __str__(self) -> str:
        return f"free {_names(self.registers)}"


Instruction = (
    PostReceive
    | WaitReceive
    | Run
    | Send
    | FinishSend
    | FinishSends
    | BeginGradients
    | AddGradient
    | SendGradient
    | ReplaceGradient
    | JoinGradient
    | HandOver
    | Unshard
    | Reduce
    | PassBuffers
    | UpdateBuffer
    | Record
    | Free
)


@dataclass(frozen=True)
class RankProgram:
    """One rank's part of a step.

    binds: where the registers of inputs come from. registers, slots: how many registers, and messages under
    way. gradients: (stage, parameter) of each accumulator. records: (microbatch, role) of each recorded
    value.
    """

    rank: int
    ranks: int
    stages: tuple[int, ...]
    microbatches: int
    registers: int
    slots: int
    binds: tuple[Bind, ...]
    instructions: tuple[Instruction, ...]
    gradients: tuple[tuple[int, str], ...]
    records: tuple[tuple[int, Role], ...]

    @property
    def needed(self) -> frozenset[tuple[int, int, RunKind]]:
        """The callables it takes: (specialisation, stage, kind)."""
        return frozenset(
            (step.specialisation, step.stage, step.kind) for step in self.instructions if isinstance(step, Run)
        )

    def _lines(self) -> Iterator[str]:
        yield f"rank {self.rank} of {self.ranks}: {named_stages(self.stages)}, {self.microbatches} microbatches"
        for bind in self.binds:
            yield f"  {bind}"
        for number, (stage, name) in enumerate(self.gradients):
            yield f"  g{number} = grad {name}" + (f" of stage {stage}" if len(self.stages) > 1 else "")
        for instruction in self.instructions:
            yield f"  {instruction}"

    def __str__(self) -> str:
        return "\n".join(self._lines()) + "\n"


def _names(registers: Iterable[int | None]) -> str:
    return ", ".join("_" if register is None else f"%{register}" for register in registers)


def _slots(slots: Iterable[int]) -> str:
    """Accumulators, runs of them as `g0-g7`."""
    runs: list[list[int]] = []
    for slot in slots:
        if runs and slot == runs[-1][1] + 1:
            runs[-1][1] = slot
        else:
            runs.append([slot, slot])
    return ", ".join(f"g{first}" if first == last else f"g{first}-g{last}" for first, last in runs)


def _message(edge: Edge, microbatch: int | None) -> str:
    return str(edge) if microbatch is None else f"{edge} of microbatch {microbatch}"
