"""Sizes known at run time only live and die on one stage: no rank could compute the shape of what arrives."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch.fx import Node

from graphcomp.errors import PartitionError
from graphcomp.ir import meta, spelling
from graphcomp.ir.run_time_sizes import has_run_time_size
from graphcomp.partition.chunks import inside_chunks
from graphcomp.partition.place import Slot

__all__ = ["check_cuts", "crossing_error", "has_run_time_size", "shown", "uncuttable"]


def uncuttable(forward: Sequence[Node]) -> set[int]:
    """The positions among the owned forward nodes where a cut would go through chunks, or separate a value of run-time
    size from what reads it."""
    return {*inside_chunks(forward), *_crossed(forward)}


def shown(numbers: Iterable[Node], values: Iterable[Node], own: Slot, slots: Mapping[Node, Slot]) -> list[Node]:
    """Those of the numbers, read in slot `own`, that sizes of the values are made of.

    A program that is given such values is given these too: a compiler has no other way to tell what they are.
    """
    used = {symbol for value in values for symbol in spelling.free_symbols(meta.value(value))}
    return [n for n in numbers if slots[n] == own and spelling.expression(meta.value(n)) in used]


def check_cuts(forward: Sequence[Node], cuts: Sequence[int], split: Sequence[str] | None) -> None:
    """Raises PartitionError for a cut that a value of run-time size would have to cross."""
    crossed = _crossed(forward)
    for stage, cut in enumerate(cuts, start=1):
        if cut in crossed:
            raise crossing_error(crossed[cut], f"stage {stage}", split[stage - 1] if split else None)


def crossing_error(value: Node, to: str, named: str | None = None) -> PartitionError:
    return PartitionError(
        f"the cut before {to} stands where the number of rows is known at run time only, and no rank could compute the "
        "shape of what arrives",
        where=", ".join(meta.place(value)),
        expected="what is done with rows that a mask, or an exact exchange, picks, and their way back, on one stage",
        got=f"Plan(split=...) names '{named}', which %{value.name} would cross" if named else f"%{value.name}",
        do="begin the stage at another module; pick rows by the batch alone, whose sizes all stages know (if a mask is "
        "computed in floating point, compute it in the data loader); or declare a capacity: "
        "all_to_all(..., capacity=...)",
    )


def _crossed(forward: Sequence[Node]) -> dict[int, Node]:
    """By position: a value of run-time size that is made before it and read at or after it."""
    place = {node: i for i, node in enumerate(forward)}
    found: dict[int, Node] = {}
    for i, node in enumerate(forward):
        if has_run_time_size(node):
            last = max((place[user] for user in node.users if user in place), default=i)
            for position in range(i + 1, last + 1):
                found.setdefault(position, node)
    return found
