"""Rules: how each operation of a region with rows is computed of some of the rows (see `passes.rows`)."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import sympy
import torch
from torch.fx import Node
from torch.fx.node import map_aggregate

from graphcomp.compat.operators import OpOverload, argument_names
from graphcomp.compat.symbols import expression
from graphcomp.ir import meta
from graphcomp.ir.effects import is_impure
from graphcomp.ir.program import Program
from graphcomp.passes.rows import Mark, Mixes, Piece, Rows, Selection, State, Step, Total

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
        args = _args(product)
        left = args[place]
        if not isinstance(left, Node):
            raise Mixes("it is no product of two matrices")
        args[place] = Piece(left, tuple(self._shape(left)[:1]), 0, 1)
        if place:
            args[0] = self._operand(args[0], product, Rows(1, 0))
        return Step(Rows(1, 0), product.target, tuple(args), product.kwargs)

    def step(self, node: Node) -> Step:
        """Raises Mixes."""
        if is_impure(node):
            raise Mixes("it draws random numbers, or talks to other ranks")
        if node.target is operator.getitem:
            source, place = _args(node)
            several: Any = self.states[source]
            return Step(several[place], node.target, node.args)
        if not isinstance(node.target, OpOverload):
            raise Mixes("it is no operation on tensors that is known here")
        rule = _RULES.get(node.target)
        if rule is None and (torch.Tag.pointwise in node.target.tags or node.target in _POINTWISE):
            rule = RowRules._pointwise
        if rule is None:
            raise Mixes("it is not known to treat rows one by one")
        if rule is not RowRules._nll_backward and any(isinstance(self.states.get(n), Total) for n in _inputs(node)):
            raise Mixes("it takes a sum over all rows")
        return rule(self, node)

    # Sizes and states.

    def _shape(self, node: Node) -> list[Any]:
        found = meta.tensor(node)
        if found is None:
            raise Mixes(f"'{node.name}' is no tensor")
        return list(found.shape)

    def same(self, left: Sequence[Any], right: Sequence[Any]) -> bool:
        """Whether sizes are equal for all batches."""
        return len(left) == len(right) and all(
            _is_zero(self._number(one) - self._number(two)) for one, two in zip(left, right, strict=True)
        )

    def _number(self, size: Any) -> Any:
        return sympy.sympify(expression(self.program.fake_mode, size))

    def _product(self, sizes: Sequence[Any]) -> Any:
        return sympy.prod([self._number(size) for size in sizes])

    def _rows(self, node: Any) -> Rows:
        """The state of an argument that has rows, each as a row."""
        found = self.states.get(node)
        if not isinstance(found, Rows) or found.turned:
            raise Mixes("it takes rows as columns" if isinstance(found, Rows) else "it needs a value with rows")
        return found

    def _first(self, node: Node) -> tuple[Node, Rows]:
        """The first argument, with rows."""
        return _args(node)[0], self._rows(_args(node)[0])

    def _common(self, node: Node, like: Node) -> Rows:
        """The one state of all inputs with rows, which must stand as in `like`."""
        own = [n for n in _inputs(node) if n in self.states]
        states = [self._rows(n) for n in own]
        first = states[0]
        for one, state in zip(own, states, strict=True):
            shape, wanted = self._shape(one), self._shape(like)
            if (state.lead, state.space) != (first.lead, first.space) or len(shape) != len(wanted):
                raise Mixes("it combines rows of different places")
            if not self.same(shape[: state.lead], wanted[: state.lead]):
                raise Mixes("it combines rows of different places")
        if any(state.zero for state in states) and not _keeps_zero(node, [n for n in own if self._rows(n).zero]):
            raise Mixes("it comes behind a selection of rows and does not leave zeros as they are")
        return replace(first, zero=any(state.zero for state in states))

    def _operand(self, x: Any, like: Node, rows: Rows, every: bool = False) -> Any:
        """An argument as it meets the rows of `like`: itself, or its rows. every: it has to have them."""
        if not isinstance(x, Node) or x in self.states or meta.tensor(x) is None:
            return x
        shape, wanted = self._shape(x), self._shape(like)
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

    def _mapped(self, node: Node, like: Node, rows: Rows, **changes: Any) -> Step:
        """The same operation with its inputs' rows. changes: other values for arguments, by name."""
        given = _given(node) | changes
        given.pop("memory_format", None)
        ready = {name: map_aggregate(x, lambda x: self._operand(x, like, rows)) for name, x in given.items()}
        names = list(_given(node))[: len(node.args)]
        args = tuple(ready.pop(name) for name in names if name in ready)
        return Step(rows, node.target, args, ready)

    # Rules.

    def _pointwise(self, node: Node) -> Step:
        return self._mapped(node, node, self._common(node, node))

    def _same(self, node: Node) -> Step:
        return Step(self.states[_args(node)[0]], None, (_args(node)[0],))

    def _along(self, node: Node) -> Step:
        """Works along dimensions behind those of the rows."""
        given = _given(node)
        first = next(x for x in given.values() if isinstance(x, Node))
        rows, rank = self._common(node, first), len(self._shape(first))
        for x in given.values():
            self._operand(x, first, rows, every=isinstance(x, Node) and meta.tensor(x) is not None)
        dims = _dimensions(given.get("dim", -1 if node.target in _LAST else None), rank)
        if any(dim < rows.lead for dim in dims):
            raise Mixes("it works along the rows, or over all of them")
        moved = [dim - rows.lead + 1 for dim in dims]
        step = self._mapped(node, first, rows, dim=moved if isinstance(given.get("dim"), list | tuple) else moved[0])
        several = meta.value(node)
        return replace(step, state=(rows,) * len(several)) if isinstance(several, tuple | list) else step

    def _sum(self, node: Node) -> Step:
        given = _given(node)
        source, rows = self._first(node)
        rank = len(self._shape(source))
        dims = _dimensions(given.get("dim"), rank)
        lead = set(range(rows.lead))
        if not lead & set(dims):
            return self._along(node)
        if not lead <= set(dims):
            raise Mixes("it sums over some of the dimensions that make up the rows")
        moved = [0, *(dim - rows.lead + 1 for dim in dims if dim >= rows.lead)]
        more = {"dtype": given["dtype"]} if given.get("dtype") is not None else {}
        keep = bool(given.get("keepdim", False))
        if keep and rows.lead > 1:
            raise Mixes("it keeps several dimensions of rows that it has summed over")
        return Step(Total(rows), aten.sum.dim_IntList, (source, moved, keep), more)

    def _view(self, node: Node) -> Step:
        source, rows = self._first(node)
        old, new = self._shape(source), self._shape(node)
        count = self._product(old[: rows.lead])
        inside = old[rows.lead :]
        possible = [n for n in range(1, len(new) + 1) if _is_zero(self._product(new[:n]) - count)]
        if not possible:
            raise Mixes("it reshapes rows together with what is in them")
        # Several are possible where sizes are 1: then what is in a row stays, if there is anything.
        unchanged = len(new) - len(inside)
        lead = unchanged if inside and unchanged in possible else possible[0]
        state = replace(rows, lead=lead)
        if self.same(new[lead:], inside):
            return Step(state, None, (source,))
        return Step(state, aten.view.default, (source, [-1, *_plain(new[lead:])]))

    def _unsqueeze(self, node: Node) -> Step:
        source, rows = self._first(node)
        (dim,) = _dimensions(_given(node)["dim"], len(self._shape(node)))
        if dim < rows.lead:
            return Step(replace(rows, lead=rows.lead + 1), None, (source,))
        return Step(rows, aten.unsqueeze.default, (source, dim - rows.lead + 1))

    def _squeeze(self, node: Node) -> Step:
        source, rows = self._first(node)
        (dim,) = _dimensions(_given(node)["dim"], len(self._shape(source)))
        if dim < rows.lead:
            raise Mixes("it takes away a dimension of the rows")
        return Step(rows, aten.squeeze.dim, (source, dim - rows.lead + 1))

    def _expand(self, node: Node) -> Step:
        source, rows = self._first(node)
        old, new = self._shape(source), self._shape(node)
        if len(old) != len(new) or not self.same(old[: rows.lead], new[: rows.lead]):
            raise Mixes("it repeats rows")
        return Step(rows, aten.expand.default, (source, [-1, *_plain(new[rows.lead :])]))

    def _slice(self, node: Node) -> Step:
        source, rows = self._first(node)
        dim, *limits = _sliced(_given(node), len(self._shape(source)))
        if self.same(self._shape(node), self._shape(source)):
            return self._same(node)
        if dim >= rows.lead:
            return Step(rows, node.target, (source, dim - rows.lead + 1, *limits))
        shapes = (tuple(self._shape(one)[: rows.lead]) for one in (source, node))
        selection = Selection((dim, *limits), *shapes)
        if rows.zero:
            raise Mixes("it selects rows a second time in backward")
        if rows.space == len(self.selections):
            self.selections.append(selection)
        elif not self._is(selection, self.selections[rows.space]):
            raise Mixes("it selects other rows than another operation does")
        return Step(replace(rows, space=rows.space + 1), None, (source,))

    def _slice_backward(self, node: Node) -> Step:
        source, rows = self._first(node)
        given = _given(node)
        dim, *limits = _sliced(given, len(self._shape(node)))
        if self.same(self._shape(node), self._shape(source)):
            return self._same(node)
        if dim >= rows.lead:
            sizes = [Mark.LENGTH, *_plain(self._shape(node)[rows.lead :])]
            return Step(rows, node.target, (source, sizes, dim - rows.lead + 1, *limits))
        shapes = (tuple(self._shape(one)[: rows.lead]) for one in (node, source))
        back = Selection((dim, *limits), *shapes)
        if rows.space == 0 or not self._is(back, self.selections[rows.space - 1]):
            raise Mixes("it puts rows back in another place than they were selected from")
        return Step(replace(rows, space=rows.space - 1, zero=True), None, (source,))

    def _is(self, one: Selection, other: Selection) -> bool:
        return one.arguments == other.arguments and self.same(one.before, other.before)

    def _turn(self, node: Node) -> Step:
        rows = self.states[_args(node)[0]]
        if not isinstance(rows, Rows) or rows.lead != 1 or len(self._shape(node)) != 2:
            raise Mixes("it moves the dimensions of the rows")
        if node.target is aten.permute.default and [d % 2 for d in _args(node)[1]] != [1, 0]:
            raise Mixes("it moves no dimension")
        if node.target is aten.transpose.int and {d % 2 for d in _args(node)[1:]} != {0, 1}:
            raise Mixes("it moves no dimension")
        return Step(replace(rows, turned=not rows.turned), aten.t.default, (_args(node)[0],))

    def _product_of(self, node: Node) -> Step:
        *bias, left, right = _args(node)
        one, two = self.states.get(left), self.states.get(right)
        if any(isinstance(state, Rows) and state.lead != 1 for state in (one, two)):
            raise Mixes("it is a product of matrices that are all rows")
        if isinstance(one, Rows) and not one.turned and two is None:
            if bias and one.zero:
                raise Mixes("it comes behind a selection of rows and does not leave zeros as they are")
            bias = [self._operand(x, node, one) for x in bias]
            return Step(one, node.target, (*bias, left, right), node.kwargs)
        if not bias and isinstance(one, Rows) and one.turned and (two is None or self._rows(right).space == one.space):
            if two is None:
                right = Piece(right, tuple(self._shape(right)[:1]), one.space, 1)
            return Step(Total(one), aten.mm.default, (left, right))
        if not bias and one is None and isinstance(two, Rows) and not two.turned:
            turned = Piece(left, tuple(self._shape(left)[1:]), two.space, 1, turned=True)
            return Step(Total(two), aten.mm.default, (turned, right))
        raise Mixes("it is a product that is not row by row")

    def _nll(self, node: Node) -> Step:
        source, target, weight, reduction, ignored = _args(node)
        rows = self._rows(source)
        if reduction == 1:
            raise Mixes("it is a mean: it divides by the number of all labels")
        labels = self._labels(target, source, rows)
        first: State = Total(rows) if reduction == 2 else rows
        return Step((first, Total(rows)), node.target, (source, labels, weight, reduction, ignored))

    def _nll_backward(self, node: Node) -> Step:
        gradient, source, target, weight, reduction, ignored, weights = _args(node)
        rows = self._rows(source)
        if reduction == 1:
            raise Mixes("it is the backward of a mean")
        if reduction == 0:
            gradient = self._labels(gradient, source, rows)
        # The sum of weights is not looked at unless it is a mean.
        args = (gradient, source, self._labels(target, source, rows), weight, reduction, ignored, weights)
        return Step(rows, node.target, args)

    def _labels(self, x: Any, source: Any, rows: Rows) -> Any:
        """An argument with one element a row."""
        if x in self.states:
            if self._rows(x) != rows:
                raise Mixes("it combines rows of different places")
            return x
        if rows.lead != 1 or not isinstance(x, Node) or len(self._shape(x)) != 1:
            raise Mixes("its labels do not stand row by row")
        # As many as there are rows, or the operation would not have run.
        return Piece(x, tuple(self._shape(x)), rows.space, 1)


def _args(node: Node) -> list[Any]:
    return list(node.args)


def _inputs(node: Node) -> list[Node]:
    return [n for n in node.all_input_nodes if n.op != "output"]


def _given(node: Node) -> dict[str, Any]:
    names = argument_names(node.target) if isinstance(node.target, OpOverload) else []
    return dict(zip(names, node.args, strict=False)) | node.kwargs


def _dimensions(dim: Any, rank: int) -> list[int]:
    """Dimensions as numbers from 0; none given: all of them."""
    if dim is None or (isinstance(dim, list | tuple) and not dim):
        return list(range(rank))
    return [d % rank for d in (dim if isinstance(dim, list | tuple) else [dim])]


def _sliced(given: Mapping[str, Any], rank: int) -> tuple[Any, ...]:
    """Dimension, start, end and step of a slice or its backward."""
    end = given.get("end")
    start, end = given.get("start"), 2**63 - 1 if end is None else end
    return given.get("dim", 0) % rank, start or 0, end, given.get("step", 1)


def _plain(sizes: Sequence[Any]) -> list[int]:
    if not all(isinstance(size, int) for size in sizes):
        raise Mixes("what is in a row has no fixed size")
    return list(sizes)


def _is_zero(number: Any) -> bool:
    return bool(sympy.expand(number) == 0)


def _keeps_zero(node: Node, zeros: Sequence[Node]) -> bool:
    """Whether the result is zero where these inputs are."""
    if node.target in _ZERO_IF_ANY:
        return True
    if node.target in _ZERO_IF_FIRST:
        return _args(node)[0] in zeros
    return node.target in _ZERO_IF_ALL and all(n in zeros for n in node.all_input_nodes)


_LAST = frozenset({aten.topk.default, aten.sort.default})
"""Work along the last dimension if they are not told otherwise."""
_POINTWISE = frozenset({
    aten._to_copy.default, aten.masked_fill.Tensor, aten.hardtanh_backward.default, aten.softplus_backward.default,
    aten.zeros_like.default, aten.ones_like.default, aten.full_like.default,
})  # fmt: skip
"""Those that torch has not tagged so."""
_ZERO_IF_ANY = frozenset({aten.mul.Tensor, aten.mul.Scalar, aten._to_copy.default, aten.neg.default})
_ZERO_IF_FIRST = frozenset({
    aten.div.Tensor, aten.div.Scalar, aten.tanh_backward.default, aten.threshold_backward.default,
    aten.sigmoid_backward.default, aten.hardtanh_backward.default, aten.sum.dim_IntList,
    aten._log_softmax_backward_data.default, aten._softmax_backward_data.default,
})  # fmt: skip
_ZERO_IF_ALL = frozenset({aten.add.Tensor, aten.sub.Tensor})

_RULES: Mapping[Any, Callable[[RowRules, Node], Step]] = MappingProxyType(
    dict.fromkeys((aten.view.default, aten._unsafe_view.default, aten.reshape.default), RowRules._view)
    | dict.fromkeys((aten.clone.default, aten.detach.default, aten.alias.default), RowRules._same)
    | dict.fromkeys((aten.sum.default, aten.sum.dim_IntList), RowRules._sum)
    | dict.fromkeys((aten.t.default, aten.transpose.int, aten.permute.default), RowRules._turn)
    | dict.fromkeys((aten.mm.default, aten.addmm.default), RowRules._product_of)
    | dict.fromkeys(
        (
            *(aten._log_softmax.default, aten._softmax.default, aten.logsumexp.default, aten.mean.dim),
            *(aten._log_softmax_backward_data.default, aten._softmax_backward_data.default),
            *(aten.amax.default, aten.amin.default, aten.max.dim, aten.min.dim, aten.argmax.default),
            *(aten.argmin.default, aten.gather.default, aten.scatter.src, aten.scatter.value),
            *(aten.scatter_add.default, aten.cumsum.default, aten.topk.default, aten.sort.default),
            *(aten.any.dim, aten.all.dim),
        ),
        RowRules._along,
    )
    | {
        aten.unsqueeze.default: RowRules._unsqueeze,
        aten.squeeze.dim: RowRules._squeeze,
        aten.expand.default: RowRules._expand,
        aten.slice.Tensor: RowRules._slice,
        aten.slice_backward.default: RowRules._slice_backward,
        aten.nll_loss_forward.default: RowRules._nll,
        aten.nll_loss_backward.default: RowRules._nll_backward,
    }
)
"""The operations that are known, besides those that work element by element."""
