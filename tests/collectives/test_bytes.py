"""What a backward moves over the wire next to its forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Node

from graphcomp import collectives as gc
from graphcomp.compat import collective_operators as ops
from graphcomp.compat.symbols import new_fake_mode
from graphcomp.compat.tracing import trace
from graphcomp.ir.collective_calls import is_start
from tests.collectives.fake import fake_mesh

SIZE = 4
# By how much of its input a rank sends, in the usual ring algorithms.
SENT: dict[Any, float] = {
    ops.ALL_REDUCE: 2 * (SIZE - 1) / SIZE,
    ops.ALL_GATHER: SIZE - 1,
    ops.REDUCE_SCATTER: (SIZE - 1) / SIZE,
    ops.ALL_TO_ALL: (SIZE - 1) / SIZE,
    ops.BROADCAST: (SIZE - 1) / SIZE,
}

Run = Callable[[Tensor, Tensor, Any], Tensor]


def moved(node: Node) -> float:
    sent = node.args[0].meta["val"]  # type: ignore[union-attr]
    return SENT[node.target] * sent.numel() * sent.element_size()


def sent(run: Run, rows: int, backward: bool) -> float:
    """Bytes that a rank sends in a collective, with its backward or without."""

    def function(x: Tensor, numbers: Tensor) -> list[Tensor]:
        y = run(x, numbers, mesh)
        return list(torch.autograd.grad(y.sum(), [x])) if backward else [y]

    with fake_mesh(dp=SIZE) as mesh, new_fake_mode():
        x, numbers = torch.empty(rows, 8, requires_grad=True), torch.empty(SIZE, dtype=torch.int64)
        graph = trace(function, (x, numbers)).graph
    return sum(moved(node) for node in graph.nodes if is_start(node))


@pytest.mark.parametrize(
    ("run", "rows"),
    [
        (lambda x, _, group: gc.all_reduce(x, group), 8),
        (lambda x, _, group: gc.all_gather(x, group), 8),
        (lambda x, _, group: gc.reduce_scatter(x, group), 8),
        (lambda x, _, group: gc.all_to_all(x, group), 8),
        (lambda x, counts, group: gc.all_gather_uneven(x, group, counts, 8), 8),
        (lambda x, counts, group: gc.all_gather_uneven(x, group, counts, 8), 5),
        (lambda x, _, group: gc.all_reduce(x, group).square(), 8),
    ],
    ids=["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "uneven full", "uneven short", "used twice"],
)
def test_a_backward_moves_what_its_forward_moves(run: Run, rows: int) -> None:
    forward = sent(run, rows, backward=False)
    assert sent(run, rows, backward=True) - forward == forward > 0


def test_bounded_exchanges_tell_each_other_counts_only_once() -> None:
    def run(x: Tensor, splits: Tensor, group: Any) -> Tensor:
        return gc.all_to_all(x, group, input_splits=splits, capacity=4).rows

    counts = SENT[ops.ALL_TO_ALL] * SIZE * 8
    forward = sent(run, 8, backward=False)
    assert sent(run, 8, backward=True) - forward == forward - counts


def test_a_broadcast_moves_twice_as_much_backward() -> None:
    def run(x: Tensor, _: Tensor, group: Any) -> Tensor:
        return gc.broadcast(x, group)

    forward, tables = sent(run, 8, backward=False), SENT[ops.ALL_TO_ALL] * SIZE
    assert sent(run, 8, backward=True) - forward == 2 * forward + tables
