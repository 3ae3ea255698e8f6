"""Which operations of a program treat rows one by one, and how each is computed of some of them (see `passes.rows`)."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import sympy
import torch
from torch.fx import Node
from torch.fx.node import map_aggregate

from graphcomp.compat.operators import OpOverload
from graphcomp.compat.symbols import expression
from graphcomp.ir import meta
from graphcomp.ir.effects import is_impure
from graphcomp.ir.program import Program
from graphcomp.passes.row_arguments import args_of, given_of, inputs_of, is_zero, keeps_zero
from graphcomp.passes.row_operations import POINTWISE, RULES, nll_backward, pointwise
from graphcomp.passes.rows import Mixes, Piece, Rows, Selection, State, Step, Total

aten = torch.ops.aten


@dataclass
class RowRules:
    """Answers a `Step` for each node of a program that has rows, and remembers the selections of rows on the way."""

    program: Program
    states: dict[Node, State] = field(default_factory=dict)
    selections: list[Selection] = field(default_factory=list)

    def start(self, product: Node) -> Step:
        """The product whose result has the rows to begin with."""
        place = 0 if product.target is aten.mm.default else 1
        args = args_of(product)
        left = args[place]
        if not isinstance(left, Node):
            raise Mixes("it is no product of two matrices")
        args[place] = Piece(left, tuple(self.shape(left)[:1]), 0, 1)
        if place:
            args[0] = self.operand(args[0], product, Rows(1, 0))
        return Step(Rows(1, 0), product.target, tuple(args), product.kwargs)

    def step(self, node: Node) -> Step:
        """Raises Mixes."""
        if is_impure(node):
            raise Mixes("it draws random numbers, or talks to other ranks")
        if node.target is operator.getitem:
            source, place = args_of(node)
            several: Any = self.states[source]
            return Step(several[place], node.target, node.args)
        if not isinstance(node.target, OpOverload):
            raise Mixes("it is no operation on tensors that is known here")
        rule = RULES.get(node.target)
        if rule is None and (torch.Tag.pointwise in node.target.tags or node.target in POINTWISE):
            rule = pointwise
        if rule is None:
            raise Mixes("it is not known to treat rows one by one")
        if rule is not nll_backward and any(isinstance(self.states.get(n), Total) for n in inputs_of(node)):
            raise Mixes("it takes a sum over all rows")
        return rule(self, node)

    # Sizes and states.

    def shape(self, node: Node) -> list[Any]:
        found = meta.tensor(node)
        if found is None:
            raise Mixes(f"'{node.name}' is no tensor")
        return list(found.shape)

    def same(self, left: Sequence[Any], right: Sequence[Any]) -> bool:
        """Whether sizes are equal for all batches."""
        return len(left) == len(right) and all(
            is_zero(self._number(one) - self._number(two)) for one, two in zip(left, right, strict=True)
        )

    def _number(self, size: Any) -> Any:
        return sympy.sympify(expression(self.program.fake_mode, size))

    def product(self, sizes: Sequence[Any]) -> Any:
        return sympy.prod([self._number(size) for size in sizes])

    def rows_of(self, node: Any) -> Rows:
        """The state of an argument that has rows, each as a row."""
        found = self.states.get(node)
        if not isinstance(found, Rows) or found.turned:
            raise Mixes("it takes rows as columns" if isinstance(found, Rows) else "it needs a value with rows")
        return found

    def first(self, node: Node) -> tuple[Node, Rows]:
        """The first argument, with rows."""
        return args_of(node)[0], self.rows_of(args_of(node)[0])

    def common(self, node: Node, like: Node) -> Rows:
        """The one state of all inputs with rows, which must stand as in `like`."""
        own = [n for n in inputs_of(node) if n in self.states]
        states = [self.rows_of(n) for n in own]
        first = states[0]
        for one, state in zip(own, states, strict=True):
            shape, wanted = self.shape(one), self.shape(like)
            if (state.lead, state.space) != (first.lead, first.space) or len(shape) != len(wanted):
                raise Mixes("it combines rows of different places")
            if not self.same(shape[: state.lead], wanted[: state.lead]):
                raise Mixes("it combines rows of different places")
        if any(state.zero for state in states) and not keeps_zero(node, [n for n in own if self.rows_of(n).zero]):
            raise Mixes("it comes behind a selection of rows and does not leave zeros as they are")
        return replace(first, zero=any(state.zero for state in states))

    def operand(self, x: Any, like: Node, rows: Rows, every: bool = False) -> Any:
        """An argument as it meets the rows of `like`: itself, or its rows. every: it has to have them."""
        if not isinstance(x, Node) or x in self.states or meta.tensor(x) is None:
            return x
        shape, wanted = self.shape(x), self.shape(like)
        own = len(shape) - (len(wanted) - rows.lead)
        lead = wanted[: rows.lead]
        if every:
            if own != rows.lead or not self.same(shape[:own], lead):
                raise Mixes(
                    f"nothing says that '{x.name}' always has as many rows (compare its shape with the logits')"
                )
            return Piece(x, tuple(lead), rows.space, own)
        if own <= 0 or (own == 1 and isinstance(shape[0], int) and shape[0] == 1):
            return x
        padded = [*[1] * (rows.lead - own), *shape[:own]]
        known = [isinstance(one, int) and one == 1 for one in padded]
        if not all(one or self.same([own], [two]) for one, own, two in zip(known, padded, lead, strict=True)):
            raise Mixes(f"nothing says that '{x.name}' always has as many rows (compare its shape with the logits')")
        return Piece(x, tuple(lead), rows.space, own)

    def mapped(self, node: Node, like: Node, rows: Rows, **changes: Any) -> Step:
        """The same operation with its inputs' rows. changes: other values for arguments, by name."""
        given = given_of(node) | changes
        given.pop("memory_format", None)
        ready = {name: map_aggregate(x, lambda x: self.operand(x, like, rows)) for name, x in given.items()}
        names = list(given_of(node))[: len(node.args)]
        args = tuple(ready.pop(name) for name in names if name in ready)
        return Step(rows, node.target, args, ready)
