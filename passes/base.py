"""What a pass is: a frozen dataclass that turns a program into another, and says what it needs and gives."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import ClassVar

from graphcomp.ir.program import Level, Program


@dataclass(frozen=True)
class Pass(ABC):
    """Base of all passes. The fields of a subclass are its options; they must be words, numbers or booleans.

    name: how the pass is called in a pipeline's text.
    levels: the levels whose programs it takes; it leaves the level as it is.
    requires: properties that a pass before it (or the program itself) must have provided.
    provides: properties that hold afterwards.
    conflicts: properties that must not hold when it runs.
    verifies_input: False for a pass that repairs programs which break the rules of their level.
    """

    name: ClassVar[str]
    levels: ClassVar[frozenset[Level]] = frozenset(Level)
    requires: ClassVar[frozenset[str]] = frozenset()
    provides: ClassVar[frozenset[str]] = frozenset()
    conflicts: ClassVar[frozenset[str]] = frozenset()
    verifies_input: ClassVar[bool] = True

    @abstractmethod
    def apply(self, program: Program) -> Program:
        """Take over `program` (it may be changed in place: the caller uses only what is returned)."""

    def options(self) -> Iterator[tuple[str, object]]:
        return ((field.name, getattr(self, field.name)) for field in fields(self))

    def __str__(self) -> str:
        options = ",".join(f"{name}={value_text(value)}" for name, value in self.options())
        return f"{self.name}{{{options}}}" if options else self.name


def value_text(value: object) -> str:
    """An option's value in a pipeline's text; see `pipeline.parse_pipeline` for the way back."""
    return str(value).lower() if isinstance(value, bool) else str(value)
