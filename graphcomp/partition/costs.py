"""Estimates: floating-point operations, bytes and work of graph nodes, at the sizes of the example microbatch.

Work is time, in units of the time that a matrix product takes for one floating-point operation. Its two constants were
measured with compiled stages of a GPT (width 256, 8 layers, vocabulary 4096, 2 x 256 tokens; one core, float32, minimum
over repeats): a matrix product takes 1 ms per 95 MFLOP; a block and the head with its loss, each forward and backward,
took 3220 and 4050 MFLOP's time, of which matrix products explain 2420 and 3220. Estimated are 3250 and 3850.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch.fx import Node

from graphcomp.compat.aliasing import UNDECLARED_VIEWS, viewed_argument
from graphcomp.compat.estimates import hint
from graphcomp.compat.operators import flop_formula
from graphcomp.compat.pytree import tree_map
from graphcomp.ir import meta

# What anything but a matrix product writes is bound by memory: FLOPs that a byte written stands for, once fused.
WORK_PER_BYTE = 24
# A fused attention kernel needs longer for a FLOP than a matrix product.
WORK_PER_ATTENTION_FLOP = 1.25


def elements(node: Node) -> int:
    """Number of elements of everything a node computes; 0 for numbers."""
    found = meta.value(node)
    tensors = [found] if isinstance(found, torch.Tensor) else list(found) if isinstance(found, (tuple, list)) else []
    return sum(math.prod(map(hint, t.shape)) for t in tensors if isinstance(t, torch.Tensor))


def size_bytes(node: Node) -> int:
    """Bytes of the tensor a node computes; 0 for numbers and tuples."""
    found = meta.tensor(node)
    return 0 if found is None else math.prod(map(hint, found.shape)) * found.dtype.itemsize


def matrix_flops(node: Node) -> int:
    """Floating-point operations of matrix products, convolutions and attention; 0 for everything else."""
    count = flop_formula(node.target)
    if node.op != "call_function" or count is None:
        return 0

    def concrete(argument: Any) -> Any:
        value = meta.value(argument) if isinstance(argument, Node) else argument
        if isinstance(value, torch.Tensor):
            return torch.empty([hint(size) for size in value.shape], dtype=value.dtype, device="meta")
        return hint(value) if isinstance(value, torch.SymInt) else value

    args = tree_map(concrete, node.args)
    kwargs = tree_map(concrete, node.kwargs)
    out = tree_map(lambda v: concrete(v) if isinstance(v, (torch.Tensor, torch.SymInt)) else v, meta.value(node))
    return int(count(*args, **kwargs, out_val=out))


def flops(node: Node) -> int:
    """Estimated work: matrix products by their formula, anything else one operation an element."""
    return matrix_flops(node) or elements(node)


def work(node: Node) -> int:
    """Estimated time, in FLOPs of a matrix product: of what computes by its FLOPs, of all else by the bytes written."""
    if node.target is operator.getitem or node.target in UNDECLARED_VIEWS or viewed_argument(node) is not None:
        return 0
    found = matrix_flops(node)
    if not found:
        return elements(node) * _itemsize(node) * WORK_PER_BYTE
    is_attention = "attention" in str(node.target)
    return int(found * WORK_PER_ATTENTION_FLOP) if is_attention else found


def _itemsize(node: Node) -> int:
    found = meta.value(node)
    first = found[0] if isinstance(found, (tuple, list)) and found else found
    return first.dtype.itemsize if isinstance(first, torch.Tensor) else 0
