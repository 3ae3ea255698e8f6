"""What a backend is: it turns a program into a function that runs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from graphcomp.ir.program import Program

Boxed = Callable[[list[Any]], Sequence[Any]]
"""A program as a function of ONE list: inputs in the order of `program.inputs`, `Size` inputs as ints,
constants included. The callee empties the list. A caller that keeps no other reference to an input thus
lets it be freed at its last use, in the middle of the call. Returns the outputs in the order of
`program.outputs`, None where one stands for nothing. Results never require gradients, whatever the inputs
do. A `Grad` whose `Accumulator` is an input is written to that tensor's memory."""


@dataclass(frozen=True)
class Compiled:
    """A compiled program.

    call: see `Boxed`; calling the object itself is the same, a little slower.
    conditions: sympy relations over the program's own symbols that compiling has added to those of the
    capture. Whoever
        calls it has to know that they hold.
    seconds: what it took. reused: an equal program had been compiled before.
    """

    call: Boxed
    conditions: tuple[Any, ...] = ()
    seconds: float = 0.0
    reused: bool = False

    def __call__(self, box: list[Any]) -> Sequence[Any]:
        return self.call(box)


@dataclass(frozen=True)
class Progress:
    """What a backend tells while it compiles; `seconds` is 0 at the start."""

    program: str
    state: Literal["started", "compiled", "reused"]
    seconds: float = 0.0


Listener = Callable[[Progress], None]


class Backend(Protocol):
    """programs: how many have been compiled. reused: how many more were equal to one of those."""

    programs: int
    reused: int

    @property
    def name(self) -> str: ...

    def pack(self, environment: Any) -> tuple[Any, ...]:
        """All code that was made from programs of this shape environment, in a form that can be pickled."""
        ...

    def adopt(self, packed: tuple[Any, ...], environment: Any) -> None:
        """Take over what `pack` has given; `environment` is that of the same programs, read back."""
        ...

    def compile(self, program: Program, groups: Mapping[str, str] | None = None) -> Compiled:
        """Compile for every size the program allows. Raises BackendError with the program's name.

        groups: for the program's collectives: what it calls their ranks -> name of this process's group.
        """
        ...
