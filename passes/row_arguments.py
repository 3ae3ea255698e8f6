"""What the rules of rows (`passes.row_operations`) ask of an operation's arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import sympy
import torch
from torch.fx import Node

from graphcomp.compat.operators import OpOverload, argument_names
from graphcomp.passes.rows import Mixes

aten = torch.ops.aten


def args_of(node: Node) -> list[Any]:
    return list(node.args)


def inputs_of(node: Node) -> list[Node]:
    return [n for n in node.all_input_nodes if n.op != "output"]


def given_of(node: Node) -> dict[str, Any]:
    names = argument_names(node.target) if isinstance(node.target, OpOverload) else []
    return dict(zip(names, node.args, strict=False)) | node.kwargs


def dimensions(dim: Any, rank: int) -> list[int]:
    """Dimensions as numbers from 0; none given: all of them."""
    if dim is None or (isinstance(dim, list | tuple) and not dim):
        return list(range(rank))
    return [d % rank for d in (dim if isinstance(dim, list | tuple) else [dim])]


def sliced(given: Mapping[str, Any], rank: int) -> tuple[Any, ...]:
    """Dimension, start, end and step of a slice or its backward."""
    end = given.get("end")
    start, end = given.get("start"), 2**63 - 1 if end is None else end
    return given.get("dim", 0) % rank, start or 0, end, given.get("step", 1)


def plain(sizes: Sequence[Any]) -> list[int]:
    if not all(isinstance(size, int) for size in sizes):
        raise Mixes("what is in a row has no fixed size")
    return list(sizes)


def is_zero(number: Any) -> bool:
    return bool(sympy.expand(number) == 0)


def keeps_zero(node: Node, zeros: Sequence[Node]) -> bool:
    """Whether the result is zero where these inputs are."""
    if node.target in _ZERO_IF_ANY:
        return True
    if node.target in _ZERO_IF_FIRST:
        return args_of(node)[0] in zeros
    return node.target in _ZERO_IF_ALL and all(n in zeros for n in node.all_input_nodes)


_ZERO_IF_ANY = frozenset({aten.mul.Tensor, aten.mul.Scalar, aten._to_copy.default, aten.neg.default})
_ZERO_IF_FIRST = frozenset({
    aten.div.Tensor, aten.div.Scalar, aten.tanh_backward.default, aten.threshold_backward.default,
    aten.sigmoid_backward.default, aten.hardtanh_backward.default, aten.sum.dim_IntList,
    aten._log_softmax_backward_data.default, aten._softmax_backward_data.default,
})  # fmt: skip
_ZERO_IF_ALL = frozenset({aten.add.Tensor, aten.sub.Tensor})
