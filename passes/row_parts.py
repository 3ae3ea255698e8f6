"""Writes a region of head and loss anew, one part of its rows after the other."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_aggregate

from graphcomp.compat.symbols import expression, size_value
from graphcomp.errors import CaptureError
from graphcomp.ir import meta
from graphcomp.ir.meta import Note, Phase
from graphcomp.ir.normalize import lift_sizes
from graphcomp.ir.program import Program
from graphcomp.ir.randomness import draws
from graphcomp.ir.signature import Size
from graphcomp.passes.memory import is_dense
from graphcomp.passes.row_region import Region
from graphcomp.passes.rows import Mark, Piece, Step, Total

aten = torch.ops.aten


class Parts:
    """Writes the region anew, part by part, and takes the old nodes away. repeat: backward computes logits again."""

    def __init__(self, program: Program, region: Region, chunks: int, repeat: bool) -> None:
        self.program, self.region, self.chunks, self.repeat = program, region, chunks, repeat
        self.graph, self.output = program.graph, program.output_node
        calls = [meta.note(node) for node in program.calls()]
        self.free = max((note.operation for note in calls if note.operation is not None), default=-1) + 1
        self.free_region = max((note.recompute for note in calls if note.recompute is not None), default=-1) + 1
        self.numbers: dict[Any, Any] = {}
        self.bounds: dict[int, Any] = {}
        self.flat: dict[Piece, Node] = {}
        self.head_note = replace(meta.note(region.head), operation=None, recompute=None)
        self.rows: Any = prod(region.rows)

    def run(self) -> None:
        before = list(filter(draws, self.program.calls()))
        pieces: list[Any] = []
        for step in self.region.steps.values():
            map_aggregate((step.args, dict(step.kwargs)), pieces.append)
        for piece in pieces:
            if isinstance(piece, Piece):
                self._flatten(piece)
        found: dict[Node, list[Node]] = {node: [] for node in self.region.exports}
        for index in range(self.chunks):
            _Chunk(self, index).run(found)
        for node, parts in found.items():
            new = parts[-1] if isinstance(self.region.steps[node].state, Total) else self._join(node, parts)
            for user in list(node.users):
                if user not in self.region.steps:
                    user.replace_input_with(node, new)
        for node in self.region.behind:
            self.output.prepend(node)
        for node in reversed(list(self.region.steps)):
            self.graph.erase_node(node)
        sizes = {what.symbol: node for what, node in self.program.input_nodes() if isinstance(what, Size)}
        lift_sizes(self.graph, self.program.fake_mode, sizes)
        if [n for n in self.program.calls() if draws(n)] != before:
            raise CaptureError(
                "head and loss cannot be computed in chunks: random numbers would be drawn in another order",
                do="leave out Plan(loss_chunks=...)",
            )

    # What is made once.

    def call(self, target: Any, args: Any, kwargs: Any, value: Any, note: Note, name: str) -> Node:
        with self.graph.inserting_before(self.output):
            node = self.graph.create_node("call_function", target, args, dict(kwargs), name=name)
        meta.set_value(node, value)
        meta.annotate(node, note)
        return node

    def number(self, size: Any) -> Any:
        """A size as an argument: a plain number, or a node that computes it."""
        found = expression(self.program.fake_mode, size)
        if isinstance(found, int):
            return found
        if found not in self.numbers:
            source = self.program.placeholders[0]
            # Stands for the number until all sizes are lifted together.
            note = replace(self.head_note, phase=Phase.FORWARD)
            self.numbers[found] = self.call(aten.sym_size.int, (source, 0), {}, size_value(size, found), note, "size")
        return self.numbers[found]

    def bound(self, index: int) -> Any:
        """The first row of a chunk, as an argument. All chunks are equally long except the last, which has the rest."""
        rows, chunks = self.number(self.rows), self.chunks
        if index in (0, chunks):
            return rows if index else 0
        if index not in self.bounds:
            made = self.arithmetic(operator.floordiv, rows, chunks)
            self.bounds[index] = made if index == 1 else self.arithmetic(operator.mul, self.bound(1), index)
        return self.bounds[index]

    def arithmetic(self, function: Any, left: Any, right: Any) -> Any:
        if not isinstance(left, Node) and not isinstance(right, Node):
            return function(left, right)
        values = [meta.value(x) if isinstance(x, Node) else x for x in (left, right)]
        note = replace(self.head_note, phase=Phase.FORWARD)
        return self.call(function, (left, right), {}, function(*values), note, function.__name__)

    def empty(self, sizes: Sequence[Any], like: torch.Tensor) -> torch.Tensor:
        """The value of something dense. No operation is asked, as that would decide on sizes."""
        strides: list[Any] = [1]
        for size in reversed(sizes[1:]):
            strides.insert(0, strides[0] * size)
        return torch.empty_strided(sizes, strides[: len(sizes)], dtype=like.dtype, device=like.device)

    def _flatten(self, piece: Piece) -> None:
        """All rows of a value from elsewhere, as a matrix of the rows that the loss looks at."""
        if piece in self.flat:
            return
        like = meta.value(piece.node)
        own = meta.note(piece.node)
        note = own if own.phase is Phase.BACKWARD else replace(self.head_note, phase=own.phase)
        make = _Maker(self, like, note, piece.node.name)
        node, lead = piece.node, list(piece.lead)
        if piece.turned:
            inside = list(like.shape[:1])  # type: ignore[attr-defined]
            node = make(aten.t.default, (node,), [*lead, *inside])
        else:
            inside = list(like.shape[piece.own :])  # type: ignore[attr-defined]
        given = meta.value(node).shape  # type: ignore[attr-defined]
        if not self.region.rules.same(given, [*lead, *inside]):
            sizes = [*map(self.number, [*lead, *inside])]
            expanded = make(aten.expand.default, (node, sizes), [*lead, *inside])
            node = make(aten.clone.default, (expanded,), [*lead, *inside], memory_format=torch.contiguous_format)
        for selection in self.region.selections[piece.space :]:
            node = make.view(node, lead, selection.before, inside)
            lead = list(selection.after)
            node = make(aten.slice.Tensor, (node, *selection.arguments), [*lead, *inside])
        selected = piece.space < len(self.region.selections)
        dense = node is not piece.node or is_dense(like, self.program.fake_mode)  # type: ignore[arg-type]
        if selected or (len(lead) > 1 and not dense):
            node = make(aten.clone.default, (node,), [*lead, *inside], memory_format=torch.contiguous_format)
        self.flat[piece] = make.view(node, lead, [self.rows], inside)

    def _join(self, node: Node, parts: list[Node]) -> Node:
        """The rows of all chunks; zeros where a selection has left some out."""
        state, like = self.region.steps[node].state, meta.value(node)
        inside = list(like.shape[state.lead :])  # type: ignore[attr-defined,union-attr]
        make = _Maker(self, like, meta.note(node), node.name)
        joined, lead = make(aten.cat.default, (parts,), [self.rows, *inside]), [self.rows]
        for selection in reversed(self.region.selections[state.space :]):  # type: ignore[union-attr]
            joined = make.view(joined, lead, selection.after, inside)
            lead = list(selection.before)
            sizes = [*map(self.number, [*lead, *inside])]
            joined = make(aten.slice_backward.default, (joined, sizes, *selection.arguments), [*lead, *inside])
        return make.view(joined, lead, like.shape[: state.lead], inside)  # type: ignore[attr-defined,union-attr]


@dataclass(frozen=True)
class _Maker:
    """Makes nodes of one origin."""

    emit: Parts
    like: Any
    note: Note
    name: str

    def __call__(self, target: Any, args: Any, sizes: Sequence[Any], **kwargs: Any) -> Node:
        return self.emit.call(target, args, kwargs, self.emit.empty(sizes, self.like), self.note, self.name)

    def view(self, node: Node, lead: Sequence[Any], wanted: Sequence[Any], inside: Sequence[Any]) -> Node:
        """With other dimensions in front; the node itself where they are those it has."""
        if self.emit.region.rules.same(lead, wanted):
            return node
        sizes = [*wanted, *inside]
        return self(aten.view.default, (node, [*map(self.emit.number, sizes)]), sizes)


class _Chunk:
    """One part of the rows."""

    def __init__(self, emit: Parts, index: int) -> None:
        self.emit, self.index = emit, index
        chunks, rows = emit.chunks, emit.rows
        self.length = rows // chunks if index < chunks - 1 else rows - rows // chunks * index
        self.made: dict[Node, Node] = {}
        self.pieces: dict[Piece, Node] = {}
        self.operations: dict[int, int] = {}

    def run(self, found: dict[Node, list[Node]]) -> None:
        for node, step in self.emit.region.steps.items():
            if step.target is None:
                self.made[node] = self.made[step.args[0]]
            else:
                self.made[node] = self._compute(node, step, found.get(node) or [])
            if node in found:
                self._collect(node, step, found[node])

    def _compute(self, node: Node, step: Step, sums: list[Node]) -> Node:
        args, kwargs = map_aggregate((step.args, dict(step.kwargs)), lambda x: self._argument(x, node))
        target, value = step.target, meta.value(node)
        if sums and target is aten.mm.default and isinstance(step.state, Total):
            target, args = aten.addmm.default, (sums[-1], *args)
        return self.emit.call(target, args, kwargs, self._value(value, step.state), self._note(node), node.name)

    def _collect(self, node: Node, step: Step, parts: list[Node]) -> None:
        """Add a sum to that of the chunks before; put rows behind theirs."""
        new = self.made[node]
        if isinstance(step.state, Total) and parts and new.target is not aten.addmm.default:
            note = replace(self._note(node), gradient_sum=False)
            new = self.emit.call(aten.add.Tensor, (parts[-1], new), {}, meta.value(node), note, f"{node.name}_sum")
        parts.append(new)

    def _argument(self, x: Any, user: Node) -> Any:
        if x is Mark.LENGTH:
            return self.emit.arithmetic(operator.sub, self.emit.bound(self.index + 1), self.emit.bound(self.index))
        if isinstance(x, Piece):
            return self._piece(x, user)
        return self.made.get(x, x) if isinstance(x, Node) else x

    def _piece(self, piece: Piece, user: Node) -> Node:
        if piece not in self.pieces:
            whole = self.emit.flat[piece]
            like = meta.value(whole)
            own = meta.note(whole)
            note = own if own.phase is Phase.BACKWARD else replace(self._note(user), operation=None, phase=own.phase)
            make = _Maker(self.emit, like, note, piece.node.name)
            limits = [self.emit.bound(self.index), self.emit.bound(self.index + 1)]
            sizes = [self.length, *like.shape[1:]]  # type: ignore[attr-defined]
            part = make(aten.slice.Tensor, (whole, 0, *limits), sizes)
            self.pieces[piece] = make(aten.t.default, (part,), sizes[::-1]) if piece.turned else part
        return self.pieces[piece]

    def _value(self, value: Any, state: Any) -> Any:
        """What a node computes of these rows, by what it computed of all."""
        if isinstance(value, tuple | list):
            return tuple(self._value(v, s) for v, s in zip(value, state, strict=True))
        if isinstance(state, Total):
            return value
        inside = list(value.shape[:-1] if state.turned else value.shape[state.lead :])
        found = self.emit.empty([self.length, *inside], value)
        return found.t() if state.turned else found

    def _note(self, node: Node) -> Note:
        """Each chunk has differentiable operations, and where they are repeated a region, of its own."""
        note = meta.note(node)
        number = note.operation
        if number is not None and self.index and self._is_own(number):
            if number not in self.operations:
                self.operations[number] = self.emit.free
                self.emit.free += 1
            number = self.operations[number]
        forward = note.phase is not Phase.BACKWARD
        region = self.emit.free_region + self.index if forward and self.emit.repeat else None
        return replace(note, operation=number, recompute=region, chunk=self.index)

    def _is_own(self, operation: int) -> bool:
        return any(
            meta.note(n).operation == operation and meta.note(n).phase is not Phase.BACKWARD
            for n in self.emit.region.steps
        )
