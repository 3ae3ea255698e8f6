"""How each operation on rows is computed of some of them (see `passes.rows`): one function for a kind of operation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from graphcomp.ir import meta
from graphcomp.passes.row_arguments import args_of, dimensions, given_of, is_zero, plain, sliced
from graphcomp.passes.rows import Mark, Mixes, Piece, Rows, Selection, State, Step, Total

if TYPE_CHECKING:
    from graphcomp.passes.row_rules import RowRules

aten = torch.ops.aten


def pointwise(rules: RowRules, node: Node) -> Step:
    return rules.mapped(node, node, rules.common(node, node))


def unchanged(rules: RowRules, node: Node) -> Step:
    return Step(rules.states[args_of(node)[0]], None, (args_of(node)[0],))


def along(rules: RowRules, node: Node) -> Step:
    """Works along dimensions behind those of the rows."""
    given = given_of(node)
    first = next(x for x in given.values() if isinstance(x, Node))
    rows, rank = rules.common(node, first), len(rules.shape(first))
    for x in given.values():
        rules.operand(x, first, rows, every=isinstance(x, Node) and meta.tensor(x) is not None)
    dims = dimensions(given.get("dim", -1 if node.target in _LAST else None), rank)
    if any(dim < rows.lead for dim in dims):
        raise Mixes("it works along the rows, or over all of them")
    moved = [dim - rows.lead + 1 for dim in dims]
    step = rules.mapped(node, first, rows, dim=moved if isinstance(given.get("dim"), list | tuple) else moved[0])
    several = meta.value(node)
    return replace(step, state=(rows,) * len(several)) if isinstance(several, tuple | list) else step


def sum_of(rules: RowRules, node: Node) -> Step:
    given = given_of(node)
    source, rows = rules.first(node)
    rank = len(rules.shape(source))
    dims = dimensions(given.get("dim"), rank)
    lead = set(range(rows.lead))
    if not lead & set(dims):
        return along(rules, node)
    if not lead <= set(dims):
        raise Mixes("it sums over some of the dimensions that make up the rows")
    moved = [0, *(dim - rows.lead + 1 for dim in dims if dim >= rows.lead)]
    more = {"dtype": given["dtype"]} if given.get("dtype") is not None else {}
    keep = bool(given.get("keepdim", False))
    if keep and rows.lead > 1:
        raise Mixes("it keeps several dimensions of rows that it has summed over")
    return Step(Total(rows), aten.sum.dim_IntList, (source, moved, keep), more)


def view(rules: RowRules, node: Node) -> Step:
    source, rows = rules.first(node)
    old, new = rules.shape(source), rules.shape(node)
    count = rules.product(old[: rows.lead])
    inside = old[rows.lead :]
    possible = [n for n in range(1, len(new) + 1) if is_zero(rules.product(new[:n]) - count)]
    if not possible:
        raise Mixes("it reshapes rows together with what is in them")
    # Several are possible where sizes are 1: then what is in a row stays, if there is anything.
    unchanged = len(new) - len(inside)
    lead = unchanged if inside and unchanged in possible else possible[0]
    state = replace(rows, lead=lead)
    if rules.same(new[lead:], inside):
        return Step(state, None, (source,))
    return Step(state, aten.view.default, (source, [-1, *plain(new[lead:])]))


def unsqueeze(rules: RowRules, node: Node) -> Step:
    source, rows = rules.first(node)
    (dim,) = dimensions(given_of(node)["dim"], len(rules.shape(node)))
    if dim < rows.lead:
        return Step(replace(rows, lead=rows.lead + 1), None, (source,))
    return Step(rows, aten.unsqueeze.default, (source, dim - rows.lead + 1))


def squeeze(rules: RowRules, node: Node) -> Step:
    source, rows = rules.first(node)
    (dim,) = dimensions(given_of(node)["dim"], len(rules.shape(source)))
    if dim < rows.lead:  # which has one element, or it would stay
        fewer = len(rules.shape(source)) - len(rules.shape(node))
        if fewer == rows.lead:
            raise Mixes("it takes away the dimension of the rows")
        return Step(replace(rows, lead=rows.lead - fewer), None, (source,))
    return Step(rows, aten.squeeze.dim, (source, dim - rows.lead + 1))


def expand(rules: RowRules, node: Node) -> Step:
    source, rows = rules.first(node)
    old, new = rules.shape(source), rules.shape(node)
    if len(old) != len(new) or not rules.same(old[: rows.lead], new[: rows.lead]):
        raise Mixes("it repeats rows")
    return Step(rows, aten.expand.default, (source, [-1, *plain(new[rows.lead :])]))


def slice_of(rules: RowRules, node: Node) -> Step:
    source, rows = rules.first(node)
    dim, *limits = sliced(given_of(node), len(rules.shape(source)))
    if rules.same(rules.shape(node), rules.shape(source)):
        return unchanged(rules, node)
    if dim >= rows.lead:
        return Step(rows, node.target, (source, dim - rows.lead + 1, *limits))
    shapes = (tuple(rules.shape(one)[: rows.lead]) for one in (source, node))
    selection = Selection((dim, *limits), *shapes)
    if rows.zero:
        raise Mixes("it selects rows a second time in backward")
    if rows.space == len(rules.selections):
        rules.selections.append(selection)
    elif not is_selection(rules, selection, rules.selections[rows.space]):
        raise Mixes("it selects other rows than another operation does")
    return Step(replace(rows, space=rows.space + 1), None, (source,))


def slice_backward(rules: RowRules, node: Node) -> Step:
    source, rows = rules.first(node)
    given = given_of(node)
    dim, *limits = sliced(given, len(rules.shape(node)))
    if rules.same(rules.shape(node), rules.shape(source)):
        return unchanged(rules, node)
    if dim >= rows.lead:
        sizes = [Mark.LENGTH, *plain(rules.shape(node)[rows.lead :])]
        return Step(rows, node.target, (source, sizes, dim - rows.lead + 1, *limits))
    shapes = (tuple(rules.shape(one)[: rows.lead]) for one in (node, source))
    back = Selection((dim, *limits), *shapes)
    if rows.space == 0 or not is_selection(rules, back, rules.selections[rows.space - 1]):
        raise Mixes("it puts rows back in another place than they were selected from")
    return Step(replace(rows, space=rows.space - 1, zero=True), None, (source,))


def is_selection(rules: RowRules, one: Selection, other: Selection) -> bool:
    return one.arguments == other.arguments and rules.same(one.before, other.before)


def turn(rules: RowRules, node: Node) -> Step:
    rows = rules.states[args_of(node)[0]]
    if not isinstance(rows, Rows) or rows.lead != 1 or len(rules.shape(node)) != 2:
        raise Mixes("it moves the dimensions of the rows")
    if node.target is aten.permute.default and [d % 2 for d in args_of(node)[1]] != [1, 0]:
        raise Mixes("it moves no dimension")
    if node.target is aten.transpose.int and {d % 2 for d in args_of(node)[1:]} != {0, 1}:
        raise Mixes("it moves no dimension")
    return Step(replace(rows, turned=not rows.turned), aten.t.default, (args_of(node)[0],))


def product_of(rules: RowRules, node: Node) -> Step:
    *bias, left, right = args_of(node)
    one, two = rules.states.get(left), rules.states.get(right)
    if any(isinstance(state, Rows) and state.lead != 1 for state in (one, two)):
        raise Mixes("it is a product of matrices that are all rows")
    if isinstance(one, Rows) and not one.turned and two is None:
        if bias and one.zero:
            raise Mixes("it comes behind a selection of rows and does not leave zeros as they are")
        bias = [rules.operand(x, node, one) for x in bias]
        return Step(one, node.target, (*bias, left, right), node.kwargs)
    if not bias and isinstance(one, Rows) and one.turned and (two is None or rules.rows_of(right).space == one.space):
        if two is None:
            right = Piece(right, tuple(rules.shape(right)[:1]), one.space, 1)
        return Step(Total(one), aten.mm.default, (left, right))
    if not bias and one is None and isinstance(two, Rows) and not two.turned:
        turned = Piece(left, tuple(rules.shape(left)[1:]), two.space, 1, turned=True)
        return Step(Total(two), aten.mm.default, (turned, right))
    raise Mixes("it is a product that is not row by row")


def nll(rules: RowRules, node: Node) -> Step:
    source, target, weight, reduction, ignored = args_of(node)
    rows = rules.rows_of(source)
    if reduction == 1:
        raise Mixes("it is a mean: it divides by the number of all labels")
    labels = labels_of(rules, target, source, rows)
    first: State = Total(rows) if reduction == 2 else rows
    return Step((first, Total(rows)), node.target, (source, labels, weight, reduction, ignored))


def nll_backward(rules: RowRules, node: Node) -> Step:
    gradient, source, target, weight, reduction, ignored, weights = args_of(node)
    rows = rules.rows_of(source)
    if reduction == 1:
        raise Mixes("it is the backward of a mean")
    if reduction == 0:
        gradient = labels_of(rules, gradient, source, rows)
    elif gradient in rules.states:
        raise Mixes("it takes a sum over all rows")
    # The sum of weights is not looked at unless it is a mean.
    args = (gradient, source, labels_of(rules, target, source, rows), weight, reduction, ignored, weights)
    return Step(rows, node.target, args)


def labels_of(rules: RowRules, x: Any, source: Any, rows: Rows) -> Any:
    """An argument with one element a row."""
    if x in rules.states:
        if rules.rows_of(x) != rows:
            raise Mixes("it combines rows of different places")
        return x
    if rows.lead != 1 or not isinstance(x, Node) or len(rules.shape(x)) != 1:
        raise Mixes("its labels do not stand row by row")
    # As many as there are rows, or the operation would not have run.
    return Piece(x, tuple(rules.shape(x)), rows.space, 1)


_LAST = frozenset({aten.topk.default, aten.sort.default})
"""Work along the last dimension if they are not told otherwise."""
POINTWISE = frozenset({
    aten._to_copy.default, aten.masked_fill.Tensor, aten.hardtanh_backward.default, aten.softplus_backward.default,
    aten.zeros_like.default, aten.ones_like.default, aten.full_like.default,
})  # fmt: skip
"""Those that torch has not tagged so."""

RULES: Mapping[Any, Callable[[RowRules, Node], Step]] = MappingProxyType(
    dict.fromkeys((aten.view.default, aten._unsafe_view.default, aten.reshape.default), view)
    | dict.fromkeys((aten.clone.default, aten.detach.default, aten.alias.default), unchanged)
    | dict.fromkeys((aten.sum.default, aten.sum.dim_IntList), sum_of)
    | dict.fromkeys((aten.t.default, aten.transpose.int, aten.permute.default), turn)
    | dict.fromkeys((aten.mm.default, aten.addmm.default), product_of)
    | dict.fromkeys(
        (
            *(aten._log_softmax.default, aten._softmax.default, aten.logsumexp.default, aten.mean.dim),
            *(aten._log_softmax_backward_data.default, aten._softmax_backward_data.default),
            *(aten.amax.default, aten.amin.default, aten.max.dim, aten.min.dim, aten.argmax.default),
            *(aten.argmin.default, aten.gather.default, aten.scatter.src, aten.scatter.value),
            *(aten.scatter_add.default, aten.cumsum.default, aten.topk.default, aten.sort.default),
            *(aten.any.dim, aten.all.dim),
        ),
        along,
    )
    | {
        aten.unsqueeze.default: unsqueeze,
        aten.squeeze.dim: squeeze,
        aten.expand.default: expand,
        aten.slice.Tensor: slice_of,
        aten.slice_backward.default: slice_backward,
        aten.nll_loss_forward.default: nll,
        aten.nll_loss_backward.default: nll_backward,
    }
)
"""The operations that are known, besides those that work element by element."""
