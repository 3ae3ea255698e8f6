"""Takes composite operations apart into simpler ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

from graphcomp.compat.decompositions import Table, core_table, inductor_table
from graphcomp.compat.symbols import guard_count
from graphcomp.errors import CaptureError, PlanError
from graphcomp.ir.program import Program
from graphcomp.passes.base import Pass
from graphcomp.passes.retrace import retrace

TABLES: Mapping[str, Callable[[], Table]] = MappingProxyType({"core": core_table, "inductor": inductor_table})


@dataclass(frozen=True)
class Decompose(Pass):
    """Replaces operations by what a table of torch says they consist of.

    Level: joint and stage. Option table: "inductor", the table Inductor applies itself, or "core", which
    leads to the core aten operator set. Signature, symbols and annotations stay; each part gets the
    annotation of the whole.

    Sound as far as torch's tables are: the parts compute the same function, rounded differently (relative
    difference about 1e-6 in fp32 and 1e-14 in fp64; NOT bitwise). Random operations are never taken apart, so
    the draws stay. A decomposition that would tie the program to some sizes is refused.

        before: %silu = silu(%x)
        after:  %silu_sigmoid = sigmoid(%x)    %silu = mul.Tensor(%x, %silu_sigmoid)
    """

    table: str = "inductor"
    name: ClassVar[str] = "decompose"
    provides: ClassVar[frozenset[str]] = frozenset({"decomposed"})
    conflicts: ClassVar[frozenset[str]] = frozenset({"decomposed"})

    def __post_init__(self) -> None:
        if self.table not in TABLES:
            raise PlanError("there is no such table of decompositions", expected=", ".join(TABLES), got=self.table)

    def apply(self, program: Program) -> Program:
        guards = guard_count(program.fake_mode)
        done = retrace(program, decompositions=TABLES[self.table]())
        if guard_count(program.fake_mode) != guards:
            new = [str(guard.expr) for guard in program.fake_mode.shape_env.guards[guards:]]
            raise CaptureError(
                f"decomposing program '{program.name}' makes it depend on particular sizes",
                expected="no new conditions on sizes",
                got="; ".join(new),
                do="leave out the pass 'decompose', or take another table",
            )
        return done.program
