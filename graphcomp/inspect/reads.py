"""Where a step waits for the device in order to read numbers out of tensors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePath

from graphcomp.inspect.table import shorten
from graphcomp.ir import meta, spelling
from graphcomp.ir import signature as role
from graphcomp.ir.effects import reads_numbers
from graphcomp.ir.program import Program
from graphcomp.partition.stages import Partitioned


def reads(cut: Partitioned, symbols: spelling.Symbols) -> Iterator[str]:
    """A line for what is read before a step, and for each stage that reads."""
    before = cut.joint.before
    if before is not None:
        given = [symbols.rename(what.symbol) for what in before.program.outputs if isinstance(what, role.Size)]
        yield from _waits(before.program, f"out of the batch, on every rank before a step: {', '.join(given)}")
    for stage in cut.stages:
        yield from _waits(stage.forward, f"on stage {stage.index}")


def _waits(program: Program, where: str) -> Iterator[str]:
    found = [node for node in program.calls() if reads_numbers(node)]
    if found:
        lines = ", ".join(dict.fromkeys(PurePath(meta.note(node).source or "?").name for node in found))
        yield shorten(f"  {len(found)} host sync{'s' * (len(found) > 1)} a microbatch, {where} ({lines})")
