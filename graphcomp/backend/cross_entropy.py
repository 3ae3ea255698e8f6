"""The gradient of the cross entropy, without a sum over the classes of what is zero but in one place.

    before: %g = nll_loss_backward(%up, %logp, %labels, None, 2, -100, %n)
            %d = _log_softmax_backward_data(%g, %logp, 1, float32)       # %g - exp(%logp) * sum(%g, 1)
    after:  %w = where(unsqueeze(ne(%labels, -100), 1), %up, 0)
            %d = add(%g, mul(exp(%logp), %w))

The sum is minus what the row's label has been given, exactly: all other terms are zero. Inductor would walk through the
rows and classes to add them up.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from graphcomp.ir import meta
from graphcomp.ir.calls import arguments

_aten = torch.ops.aten
_NONE, _MEAN = 0, 1  # as torch numbers the reductions


def drop_class_sum(graph: Graph) -> int:
    """Change a graph that is about to be compiled; returns how many gradients it has rewritten."""
    found = 0
    for node in list(graph.nodes):
        if node.target is _aten._log_softmax_backward_data.default and _applies(node):
            _rewrite(graph, node)
            found += 1
    return found


def _applies(node: Node) -> bool:
    """Labels of rows [n, classes] without weights of classes, in a dtype that is not rounded on the way.

    Labels in bytes are left alone: among them no label is -100, and a comparison with it would find 156.
    """
    given = arguments(node)
    loss, scores = given["grad_output"], meta.tensor(given["output"])
    if loss.target is not _aten.nll_loss_backward.default or arguments(loss)["weight"] is not None or scores is None:
        return False
    grown, labels = meta.tensor(loss), meta.tensor(arguments(loss)["target"])
    if labels is None or labels.dtype != torch.int64:
        return False
    dtypes = {scores.dtype, given["input_dtype"], grown.dtype if grown is not None else None}
    return scores.dim() == 2 and given["dim"] in (1, -1) and len(dtypes) == 1 and scores.dtype.itemsize >= 4


def _rewrite(graph: Graph, node: Node) -> None:
    loss, output = arguments(node)["grad_output"], arguments(node)["output"]
    given = arguments(loss)
    with graph.inserting_before(node):

        def call(operation: Any, *args: Any) -> Node:
            return graph.call_function(operation, args)

        up = given["grad_output"]
        if given["reduction"] == _MEAN:
            up = call(_aten.div.Tensor, up, given["total_weight"])
        if given["reduction"] == _NONE:
            up = call(_aten.unsqueeze.default, up, 1)
        counted = call(_aten.ne.Scalar, given["target"], given["ignore_index"])
        weight = call(_aten.where.ScalarOther, call(_aten.unsqueeze.default, counted, 1), up, 0)
        total = call(_aten.add.Tensor, loss, call(_aten.mul.Tensor, call(_aten.exp.default, output), weight))
    meta.set_value(total, meta.value(node))
    node.replace_all_uses_with(total)
    graph.erase_node(node)
