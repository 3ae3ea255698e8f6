"""Large matrix products on CPU by oneDNN, which torch ships, instead of MKL, where MKL is slow.

MKL takes the code for an older processor where Intel has not made it: on an AMD EPYC with AVX-512 it does half of what
oneDNN does in fp32, while on a Xeon it is the faster one. Torch's own path to oneDNN inside Inductor is for frozen
weights only; this one takes any operands. The operator behind it has no public name.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

THRESHOLD = 1 << 21
"""Multiplications from which on a product goes to oneDNN: below, a call costs more than it saves (equal at 2 ** 20)."""
COPY = 50
"""Multiplications that cost as much as an element of a left operand which does not lie row by row: oneDNN copies it."""
ROWS = 64
"""The least that a symbolic size is taken for: one program serves short and long microbatches."""

aten = torch.ops.aten
_LIBRARY = torch.library.Library("graphcomp", "FRAGMENT")
_LIBRARY.define(
    "linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout),  # Inductor makes no dense copies of its operands
)


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x [m, k] times weight [n, k] transposed, plus bias [n]; operands of any strides."""
    if not (x.numel() and weight.numel()):  # oneDNN refuses sums of no terms
        return torch.mm(x, weight.t()) if bias is None else torch.addmm(bias, x, weight.t())
    if bias is not None and not bias.is_contiguous():
        bias = bias.contiguous()
    if _overlaps(weight):
        weight = weight.contiguous()
    return torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")


def _overlaps(matrix: torch.Tensor) -> bool:
    """Whether elements may share memory in a way that oneDNN refuses; a repeated row or column is none."""
    (rows, columns), (down, right) = matrix.shape, matrix.stride()
    return bool(down and right) and down < right * columns and right < down * rows


def _fake(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


_LIBRARY.impl("linear", _linear, "CPU")
torch.library.register_fake("graphcomp::linear", _fake, lib=_LIBRARY)
LINEAR = torch.ops.graphcomp.linear.default


def pays() -> bool:
    """Whether oneDNN is there, and the faster one: by the maker, not by a measurement, so that runs are alike."""
    there = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return there and not (torch.backends.mkl.is_available() and _made_by_intel())


def _made_by_intel() -> bool:
    return str(torch.cpu.get_capabilities().get("cpu_name", "")).startswith("Intel")


def use_onednn(graph: Graph) -> int:
    """Turn the large fp32 products on CPU of a decomposed graph into calls of oneDNN; returns how many."""
    if not pays():
        return 0
    found = 0
    for node in list(graph.nodes):
        operands = _operands(node)
        if operands is None:
            continue
        bias, left, right = operands
        with graph.inserting_before(node):
            weight = graph.call_function(aten.permute.default, (right, [1, 0]))
            weight.meta["val"] = right.meta["val"].permute(1, 0)
        node.target, node.args, node.kwargs = LINEAR, (left, weight, bias), {}
        found += 1
    return found


def _operands(node: Node) -> tuple[Node | None, Node, Node] | None:
    """(bias, left, right) of a product that oneDNN is to compute."""
    bias: Any = None
    if node.target is aten.mm.default:
        left, right = node.args[:2]
    elif node.target is aten.addmm.default and not node.kwargs:
        bias, left, right = node.args[:3]
    else:
        return None
    if not isinstance(left, Node) or not isinstance(right, Node):
        return None
    values = [part.meta["val"] for part in (left, right, *([] if bias is None else [bias]))]
    if any(value.dtype is not torch.float32 or value.device.type != "cpu" for value in values):
        return None
    if bias is not None and values[2].dim() != 1:
        return None
    rows, terms, columns = (_size(size) for size in (*values[0].shape, values[1].shape[1]))
    step: Any = values[0].stride(1)
    copied = 0 if isinstance(step, int) and step == 1 else rows * terms
    return (bias, left, right) if rows * terms * columns >= THRESHOLD + COPY * copied else None


def _size(size: Any) -> int:
    return max(int(size.node.hint or 0), ROWS) if isinstance(size, torch.SymInt) else int(size)
