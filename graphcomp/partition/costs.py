"""Estimates: floating-point operations and bytes of graph nodes, at the sizes of the example microbatch."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.fx import Node
from torch.utils.flop_counter import flop_registry

from graphcomp.compat.pytree import tree_map
from graphcomp.compat.symbols import hint
from graphcomp.ir import meta


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
    packet = getattr(node.target, "_overloadpacket", None)
    count = flop_registry.get(packet)
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
