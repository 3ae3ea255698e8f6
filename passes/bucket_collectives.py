"""Joins small collectives into few larger ones."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from graphcomp.compat.collective_operators import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, WAIT
from graphcomp.errors import PlanError
from graphcomp.ir import meta
from graphcomp.ir.calls import arguments
from graphcomp.ir.collective_calls import is_start
from graphcomp.ir.meta import Note
from graphcomp.ir.program import Level, Program
from graphcomp.passes.base import Pass
from graphcomp.passes.reorder import reorder

aten = torch.ops.aten


@dataclass(frozen=True)
class BucketCollectives(Pass):
    """Joins neighbours of one kind, dtype, axis and reduction into one collective of at most so many bytes.

    Level: step. bytes: of the input or the result of a joined collective, whichever is larger. A collective of as many
    or more stands alone, uncopied, and the smaller ones around it are neighbours: those that follow each other among
    their like. Only inputs of one dimension are joined.

    Sound because a reduction works element by element and a gather moves elements, wherever in a buffer they are.
    Only collectives with equally many collectives behind each other in what they depend on are joined, so none of them
    waits for itself. The parts of a reduced bucket are views of it; those of a gathered one are copied, for the rows
    of a parameter lie apart in it. Bitwise equal where sums are taken in the same order of ranks.

        before: %a = all_reduce(%x, 'sum', dp)    %b = wait_tensor(%a)    # and the same for %y; both f32[4]
        after:  %cat = cat([%x, %y])    %a = all_reduce(%cat, 'sum', dp)    %b = wait_tensor(%a)
                %slice = slice(%b, 0, 0, 4)    %slice_1 = slice(%b, 0, 4, 8)
    """

    bytes: int
    name: ClassVar[str] = "bucket_collectives"
    levels: ClassVar[frozenset[Level]] = frozenset({Level.STEP})

    def __post_init__(self) -> None:
        if isinstance(self.bytes, bool) or not isinstance(self.bytes, int) or self.bytes < 1:
            what = "pass 'bucket_collectives' takes the most bytes of a joined collective"
            raise PlanError(what, expected="a whole number from 1", got=repr(self.bytes))

    def apply(self, program: Program) -> Program:
        for members in self._buckets(program):
            if len(members) > 1:
                _join(_Insert(program, members), members)
        reorder(program)
        return program

    def _buckets(self, program: Program) -> list[list[Node]]:
        depths = _depths(program)
        buckets: list[list[Node]] = []
        filling: dict[Hashable, tuple[list[Node], int]] = {}
        for node in program.calls():
            size = _bytes(node)
            if size is None or size >= self.bytes:
                continue
            key = _key(node, depths[node])
            members, filled = filling.get(key, ([], 0))
            if not members or filled + size > self.bytes:
                members, filled = [], 0
                buckets.append(members)
            members.append(node)
            filling[key] = members, filled + size
        return buckets


def _bytes(node: Node) -> int | None:
    """The size of a collective that can be joined with others; None for every other node."""
    if node.target not in _JOINED:
        return None
    given, result = meta.tensor(arguments(node)["input"]), meta.tensor(node)
    if given is None or result is None or given.dim() != 1 or not isinstance(given.numel(), int):
        return None
    return max(given.numel(), result.numel()) * given.element_size()


def _key(node: Node, depth: int) -> Hashable:
    """Equal for collectives that can be one."""
    given = arguments(node)
    found = meta.tensor(given.pop("input"))
    return node.target, depth, found.dtype, found.device, tuple(given.items())  # type: ignore[union-attr]


def _depths(program: Program) -> dict[Node, int]:
    """By node: how many collectives follow each other, at most, on the way to it."""
    found: dict[Node, int] = {}
    for node in program.graph.nodes:
        found[node] = max(((found[a] + is_start(a)) for a in node.all_input_nodes), default=0)
    return found


class _Insert:
    """Makes nodes in front of the last of the members, behind the inputs of all of them."""

    def __init__(self, program: Program, members: list[Node]) -> None:
        self._program, self._before = program, members[-1]
        first, last = meta.note(members[0]), meta.note(members[-1])
        served = first.module if first.module == last.module else f"{first.module} .. {last.module}"
        self.note = Note(first.phase, module=served)

    def __call__(self, note: Note, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
        graph = self._program.graph
        name = target.__name__.partition(".")[0]
        with graph.inserting_before(self._before):
            node = graph.create_node("call_function", target, args, kwargs, name=name)
        with self._program.fake_mode, torch.no_grad():
            meta.set_value(node, target(*map_arg(args, meta.value), **kwargs))  # type: ignore[arg-type]
        meta.annotate(node, note)
        return node


def _join(make: _Insert, members: list[Node]) -> None:
    given = [arguments(node) for node in members]
    sources = [each.pop("input") for each in given]
    pack, unpack = _JOINED[members[0].target]
    ranks = given[0].get("group_size", 1)
    target: Any = members[0].target
    joined = make(make.note, WAIT, make(make.note, target, pack(make, sources, ranks), *given[0].values()))
    waits = [next(iter(member.users)) for member in members]
    notes = [meta.note(wait) for wait in waits]
    parts = list(unpack(make, joined, _sizes(waits), notes, ranks))
    graph = members[0].graph
    for member, wait, part in zip(members, waits, parts, strict=True):
        wait.replace_all_uses_with(part)
        graph.erase_node(wait)
        graph.erase_node(member)


def _sizes(nodes: list[Node]) -> list[int]:
    """The number of elements of each."""
    found = map(meta.tensor, nodes)
    return [tensor.numel() for tensor in found if tensor is not None]


def _end_to_end(make: _Insert, sources: list[Node], ranks: int) -> Node:
    return make(make.note, aten.cat.default, sources)


def _by_rank(make: _Insert, sources: list[Node], ranks: int) -> Node:
    """First what goes to rank 0 from every source, then what goes to rank 1, ..."""
    sizes = _sizes(sources)
    rows = [
        make(make.note, aten.view.default, source, [ranks, size // ranks])
        for source, size in zip(sources, sizes, strict=True)
    ]
    table = make(make.note, aten.cat.default, rows, 1)
    return make(make.note, aten.view.default, table, [sum(sizes)])


def _slices(make: _Insert, joined: Node, sizes: list[int], notes: list[Note], ranks: int) -> Iterator[Node]:
    start = 0
    for size, note in zip(sizes, notes, strict=True):
        yield make(note, aten.slice.Tensor, joined, 0, start, start + size)
        start += size


def _columns(make: _Insert, joined: Node, sizes: list[int], notes: list[Note], ranks: int) -> Iterator[Node]:
    """The joined result is a table with a row for each rank; each part is a few columns of it."""
    table = make(make.note, aten.view.default, joined, [ranks, sum(sizes) // ranks])
    start = 0
    for size, note in zip(sizes, notes, strict=True):
        columns = make(note, aten.slice.Tensor, table, 1, start, start + size // ranks)
        dense = make(note, aten.clone.default, columns, memory_format=torch.contiguous_format)
        yield make(note, aten.view.default, dense, [size])
        start += size // ranks


_JOINED: dict[Any, tuple[Any, Any]] = {
    ALL_REDUCE: (_end_to_end, _slices),
    ALL_GATHER: (_end_to_end, _columns),
    REDUCE_SCATTER: (_by_rank, _slices),
}
"""Operator -> how inputs are packed, how results are unpacked."""
