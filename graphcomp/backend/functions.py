"""Operators that take functions, as Inductor takes them: where it has fused kernels as they are, elsewhere spelled out.

    before: %y = flex_attention(%q, %k, %v, @0, ...)
    after:  %s = matmul(%q, transpose(%k))   %m = where(..., %s, -inf)   ...   # on a CPU

Spelled out, the scores of all queries and keys are there at once, as in eager PyTorch.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, GraphModule

from graphcomp.compat.higher_order import PLAIN
from graphcomp.ir import meta
from graphcomp.ir.body import with_modules

FUSED = ("cuda", "xpu")
"""Devices for which Inductor has kernels of these operators with their gradients."""


def compilable(graph: Graph) -> GraphModule:
    """The graph as a module that Inductor can trace. The graph is changed."""
    for node in graph.nodes:
        if node.target in PLAIN:
            first = next(iter(meta.value(node)))  # type: ignore[call-overload]
            if isinstance(first, torch.Tensor) and first.device.type not in FUSED:
                node.target = PLAIN[node.target]
    return GraphModule(with_modules(graph), graph, class_name="program")
