"""Values enter collectives whatever their strides; a copy is made only where a value is not dense."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from graphcomp import collectives as gc
from graphcomp.compat.symbols import fake_batch_leaf, new_fake_mode
from graphcomp.compat.tracing import trace
from tests.collectives.fake import fake_mesh

aten = torch.ops.aten
COPIES = {aten.clone.default, aten.contiguous.default, aten.cat.default, aten.stack.default, aten._to_copy.default}

Run = Callable[[Tensor, Any], Tensor]
PLAIN: dict[str, Run] = {
    "all_reduce": lambda x, group: gc.all_reduce(x, group),
    "all_reduce avg": lambda x, group: gc.all_reduce(x, group, "avg"),
    "all_gather": lambda x, group: gc.all_gather(x, group),
    "reduce_scatter": lambda x, group: gc.reduce_scatter(x, group),
    "reduce_scatter avg": lambda x, group: gc.reduce_scatter(x, group, op="avg"),
    "all_to_all": lambda x, group: gc.all_to_all(x, group),
    "broadcast": lambda x, group: gc.broadcast(x, group, 1),
}
OTHER_DIMENSION: dict[str, Run] = {
    "all_gather": lambda x, group: gc.all_gather(x, group, 1),
    "all_gather chosen": lambda x, group: gc.all_gather(x, group, ranks=[1, 0]),
    "reduce_scatter": lambda x, group: gc.reduce_scatter(x, group, -1),
}


def copies(run: Run, turn: Callable[[Tensor], Tensor]) -> int:
    """How many copies a collective makes, forward and backward, of a value and a gradient that `turn` has turned."""

    def function(x: Tensor, gradient: Tensor) -> list[Tensor]:
        return list(torch.autograd.grad(run(turn(x), mesh), [x], turn(gradient)))

    with fake_mesh(dp=2) as mesh:
        mode = new_fake_mode()
        x = fake_batch_leaf(mode, torch.empty(4, 6), "x").requires_grad_()
        with mode:
            gradient = torch.empty(turn(run(turn(x), mesh)).shape)
            nodes = trace(function, (x, gradient)).graph.nodes
    return len([node for node in nodes if node.target in COPIES and node.meta["val"].dim() >= 2])


@pytest.mark.parametrize("name", PLAIN)
def test_dense_values_are_not_copied(name: str) -> None:
    assert copies(PLAIN[name], lambda x: x) == 0


@pytest.mark.parametrize("name", PLAIN)
def test_others_are_copied_once(name: str) -> None:
    """A transposed value in forward, and a transposed gradient in backward."""
    assert copies(PLAIN[name], lambda x: x.t()) == 2


@pytest.mark.parametrize("name", OTHER_DIMENSION)
def test_another_dimension_costs_one_copy_each_way(name: str) -> None:
    assert copies(OTHER_DIMENSION[name], lambda x: x) == 2
