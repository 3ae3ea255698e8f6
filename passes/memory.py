"""Which nodes share memory, and how a tensor lies in it. Comparisons of symbolic sizes never add a guard."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from graphcomp.compat.aliasing import UNDECLARED_VIEWS, viewed_argument
from graphcomp.compat.symbols import FakeTensorMode, expression


def base_of(node: Node) -> Node | None:
    """The node whose memory a view shows; None for an operation with memory of its own."""
    if node.target in UNDECLARED_VIEWS or node.target is operator.getitem:
        return node.args[0] if isinstance(node.args[0], Node) else None
    return viewed_argument(node)


def is_exposed(node: Node) -> bool:
    """Whether the node or a view of it is an output: whoever runs the program may keep it or write to it."""
    pending, seen = [node], {node}
    while pending:
        for user in pending.pop().users:
            if user.op == "output":
                return True
            if user not in seen and base_of(user) in seen:
                seen.add(user)
                pending.append(user)
    return False


def geometry(tensor: torch.Tensor, mode: FakeTensorMode) -> tuple[Any, ...] | None:
    """Type, device, sizes and strides; equal ones lay their elements out alike. None: not strided."""
    if tensor.layout is not torch.strided:
        return None
    sizes = tuple(expression(mode, size) for size in tensor.shape)
    strides = tuple(expression(mode, stride) for stride in tensor.stride())
    return tensor.dtype, tensor.device, sizes, strides, tensor.is_conj(), tensor.is_neg()


def place(tensor: torch.Tensor, mode: FakeTensorMode) -> tuple[Any, ...] | None:
    """Geometry and offset; views of one memory with equal places are the same tensor."""
    form = geometry(tensor, mode)
    return None if form is None else (*form, expression(mode, tensor.storage_offset()))


def is_dense(tensor: torch.Tensor, mode: FakeTensorMode) -> bool:
    """Whether the elements lie one after the other in row-major order, so that any view is possible."""
    if tensor.layout is not torch.strided:
        return False
    expected: Any = 1
    sizes: Sequence[Any] = [expression(mode, size) for size in tensor.shape]
    for size, stride in zip(reversed(sizes), reversed(tensor.stride()), strict=True):
        if size != 1 and expression(mode, stride) != expected:
            return False
        expected = expected * size
    return True
