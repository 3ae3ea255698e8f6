"""Operators that take functions, such as `flex_attention`. Nothing about them has a public name: neither the operators,
nor what they compute where no fused kernel does, nor what torch foretells of their results.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch._higher_order_ops.flex_attention import (
    flex_attention,
    flex_attention_backward,
    flex_attention_backward_fake_tensor_mode,
    flex_attention_fake_impl,
    sdpa_dense,
    sdpa_dense_backward,
)

__all__ = [
    "BACKWARD",
    "FAKES",
    "FLEX_ATTENTION",
    "PLAIN",
    "FunctionsRefusedError",
    "whole_gradients",
]

FLEX_ATTENTION, BACKWARD = flex_attention, flex_attention_backward


class FunctionsRefusedError(Exception):
    """An operator that takes functions cannot be held by a program. what: why; do: the way out."""

    def __init__(self, operator: str, what: str, do: str) -> None:
        super().__init__(operator, what, do)
        self.operator, self.what, self.do = operator, what, do


def _forward(*given: Any) -> tuple[Any, ...]:
    found: tuple[Any, ...] = sdpa_dense(*given)
    return found


def _backward(*given: Any) -> tuple[Any, ...]:
    """`sdpa_dense_backward` makes a gradient for each value that requires one, which in a program none does."""
    arguments = list(given)
    joint, values = arguments[8], arguments[12]
    arguments[12] = tuple(
        value.detach().requires_grad_(wanted) if isinstance(value, torch.Tensor) else value
        for value, wanted in zip(values, _differentiated(joint, len(values)), strict=True)
    )
    found: tuple[Any, ...] = sdpa_dense_backward(*arguments)
    return found


def _differentiated(joint: Any, values: int) -> list[bool]:
    """Of which values that a score function closes over its joint graph gives a gradient: those behind the score, four
    indices."""
    returned: Any = joint.graph.output_node().args[0]
    return [result is not None for result in returned[5 : 5 + values]]


def whole_gradients(joint: Any) -> bool:
    """Whether a joint graph gives whole gradients of the values that its score function closes over.

    What is scattered is added up over all scores; everything else that is made of them is one number for each.
    """
    for_each: set[Any] = set(joint.graph.find_nodes(op="placeholder")[:6])
    for node in joint.graph.nodes:
        if node.target is not _SCATTER and not for_each.isdisjoint(node.all_input_nodes):
            for_each.add(node)
    returned: Any = joint.graph.output_node().args[0]
    return for_each.isdisjoint(result for result in returned[5:] if result is not None)


_SCATTER = torch.ops.flex_lib.zeros_and_scatter.default

PLAIN: Mapping[Any, Callable[..., Any]] = {flex_attention: _forward, flex_attention_backward: _backward}
"""The operators that programs may hold, and what each computes, in plain operations."""


def _fake_forward(query: Any, *rest: Any) -> tuple[Any, ...]:
    """torch says that the statistics of double precision are float32, which they are not."""
    out, *statistics = flex_attention_fake_impl(query, *rest)
    if query.dtype is torch.float64:
        statistics = [one.new_empty(one.shape, dtype=torch.float64) for one in statistics]
    return (out, *statistics)


def _fake_backward(*given: Any) -> tuple[Any, ...]:
    """torch foretells a gradient for every value, also for those that get none."""
    *gradients, of_values = flex_attention_backward_fake_tensor_mode(*given)
    wanted = _differentiated(given[8], len(of_values))
    return (*gradients, tuple(one if use else None for one, use in zip(of_values, wanted, strict=True)))


FAKES: Mapping[Any, Callable[..., Any]] = {
    flex_attention: _fake_forward,
    flex_attention_backward: _fake_backward,
}
