"""The gradient of the cross entropy is written without a sum over the classes, and stays the same."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from graphcomp.backend.cross_entropy import drop_class_sum
from graphcomp.compat.decompositions import inductor_table, trace_with
from graphcomp.ir import meta

ROWS, CLASSES = 6, 40
SUMS = (torch.ops.aten.sum.dim_IntList, torch.ops.prims.sum.default)


def gradient(logits: Tensor, labels: Tensor, upstream: Tensor, loss: Callable[..., Tensor]) -> Tensor:
    with torch.enable_grad():
        scores = logits.detach().requires_grad_()
        (found,) = torch.autograd.grad(loss(scores, labels), scores, upstream)
    return found


def inputs(reduction: str, dtype: torch.dtype = torch.float64, ignored: bool = False) -> list[Tensor]:
    """ignored: all rows, or two of them."""
    draw = torch.Generator().manual_seed(0)
    labels = torch.full((ROWS,), -100) if ignored else torch.tensor([3, -100, 0, 39, -100, 7])
    upstream = torch.randn(ROWS if reduction == "none" else (), generator=draw, dtype=torch.float64)
    logits = torch.randn(ROWS, CLASSES, generator=draw, dtype=torch.float64)
    return [logits.to(dtype), labels, upstream.to(dtype)]


def traced(loss: Callable[..., Tensor], given: list[Tensor]) -> GraphModule:
    return make_fx(partial(gradient, loss=loss), tracing_mode="symbolic")(*given)


def sums(module: GraphModule, given: list[Tensor]) -> int:
    """Of rows over their classes, as Inductor would see them."""
    nodes = trace_with(module, given, inductor_table()).graph.nodes
    backward = [n for n in nodes if n.target in SUMS and list(n.args[1]) in ([1], [-1])]
    return len(backward)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("reduction", "ignored"),
    [("sum", False), ("mean", False), ("none", False), ("mean", True)],
    ids=["sum", "mean", "none", "mean, all labels ignored"],
)
def test_the_same_without_the_sum(reduction: str, ignored: bool, dtype: torch.dtype) -> None:
    loss = partial(F.cross_entropy, reduction=reduction)
    given = inputs(reduction, dtype, ignored)
    module = traced(loss, given)
    before = sums(module, given)
    assert drop_class_sum(module.graph) == 1
    module.recompile()
    assert sums(module, given) == before - 1
    expected = gradient(*inputs(reduction, ignored=ignored), loss=loss)
    torch.testing.assert_close(module(*given).double(), expected, rtol=8 * torch.finfo(dtype).eps, atol=0)


def other_loss(scores: Tensor, labels: Tensor, kind: str) -> Tensor:
    match kind:
        case "weights of classes":
            return F.cross_entropy(scores, labels, weight=torch.linspace(1, 2, CLASSES, dtype=scores.dtype))
        case "smoothing":
            return F.cross_entropy(scores, labels, label_smoothing=0.1, reduction="sum")
        case "images":
            return F.cross_entropy(scores[:, :, None, None], labels[:, None, None], reduction="sum")
        case _:
            return F.cross_entropy(scores.bfloat16(), labels, reduction="sum").double()


@pytest.mark.parametrize("kind", ["weights of classes", "smoothing", "images", "half precision"])
def test_what_the_rule_does_not_cover_stays(kind: str) -> None:
    module = traced(partial(other_loss, kind=kind), inputs("sum"))
    targets: list[Any] = [node.target for node in module.graph.nodes]
    assert torch.ops.aten._log_softmax_backward_data.default in targets
    assert drop_class_sum(module.graph) == 0


def test_labels_in_bytes_stay() -> None:
    """Eager PyTorch takes them, and counts label 156, which equals -100 in bytes. Fake tensors cannot: the graph of
    whole numbers is given them."""
    module = traced(partial(F.cross_entropy, reduction="sum"), inputs("sum"))
    (loss,) = module.graph.find_nodes(op="call_function", target=torch.ops.aten.nll_loss_backward.default)
    labels: Any = loss.args[2]
    whole = meta.value(labels)
    with whole.fake_mode:
        meta.set_value(labels, whole.byte())
    assert drop_class_sum(module.graph) == 0
