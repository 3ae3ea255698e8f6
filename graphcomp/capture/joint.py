"""What a capture yields: the joint program and everything known about the borders it was traced at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from graphcomp.capture.before import Before
from graphcomp.capture.state import Captured
from graphcomp.compat.pytree import TreeSpec
from graphcomp.ir.printer import print_program
from graphcomp.ir.program import Program
from graphcomp.ir.signature import BufferUpdate, Grad
from graphcomp.ir.sizes import Sizes


@dataclass(frozen=True)
class LossSpec:
    """A named loss. kind "token": divided by its token count; "mean": by the number of microbatches."""

    name: str
    kind: Literal["token", "mean"]


@dataclass(frozen=True)
class MetricSpec:
    """A named metric and how its values of all microbatches and data ranks are combined."""

    name: str
    reduction: Literal["sum", "mean", "max", "min", "last"]


@dataclass(frozen=True)
class LossChunks:
    """Head and loss in parts. head: the module of the matrix product. rows: what is dealt out, over the sizes."""

    count: int
    head: str
    rows: Any


@dataclass(frozen=True)
class Opaque:
    """A part of the model's output that is neither a tensor, nor a plain value, nor a registered container."""

    path: str
    kind: str
    do: str = "let the model leave it out (for a cache: use_cache=False), or register its type as a pytree"


@dataclass(frozen=True)
class Number:
    """A number in the model's output that follows from the microbatch's sizes. formula: sympy, over these."""

    path: str
    formula: Any


@dataclass(frozen=True)
class Joint:
    """The captured training step of one microbatch.

    program: level joint. Inputs: Param, Buffer, BatchLeaf, Size, Captured, Constant, Denominator, LossScale, Seed, only
        those in use. Outputs: Tokens, Loss, Metric, Grad (of every trainable parameter; None where eager has none),
        BufferUpdate, Output.
    sizes: the symbols, where in the microbatch each is read, and the conditions the trace relied on.
    captured: where the live tensors behind `Captured` inputs are read, by name.
    output_tree: pytree spec of the model's output.
    output_leaves: one entry a leaf: the `Output` role of a tensor, a plain value itself, a `Number`, or
        `Opaque`.
    read: the fields of a dict batch that the model or the loss function read; None: the batch is of another kind.
    seconds: what the capture took.
    groups: for the collectives of the model: what the program calls their ranks -> name of this process's group.
    chunks: of head and loss, where the program computes them in parts.
    before: what yields the sizes that follow from the contents of the batch alone; `program` takes them.
    """

    program: Program
    sizes: Sizes
    losses: tuple[LossSpec, ...]
    metrics: tuple[MetricSpec, ...]
    captured: Mapping[str, Captured]
    output_tree: TreeSpec | None
    output_leaves: tuple[Any, ...]
    read: frozenset[str] | None
    seconds: float
    groups: Mapping[str, str] = field(default_factory=dict)
    chunks: LossChunks | None = None
    before: Before | None = None

    @property
    def is_training(self) -> bool:
        """Whether it has a backward; otherwise it evaluates."""
        return any(isinstance(what, Grad) for what in self.program.outputs)

    def with_contents(self, sizes: Mapping[str, int], leaves: Mapping[str, Any]) -> Mapping[str, int]:
        """The sizes of a microbatch with those that follow from its contents. leaves: its tensors, by path."""
        return sizes if self.before is None else self.before.sizes(leaves, sizes)

    @property
    def updated(self) -> tuple[str, ...]:
        """The buffers that a step of it writes."""
        return tuple(what.name for what in self.program.outputs if isinstance(what, BufferUpdate) and self.is_training)

    def __str__(self) -> str:
        first = "" if self.before is None else f"{print_program(self.before.program)}\n"
        return first + print_program(self.program)
