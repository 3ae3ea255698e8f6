"""Each collective as it is called on one rank, and what it means as a function of all ranks' tensors in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from graphcomp import collectives as gc

Tensors = list[Tensor]


@dataclass(frozen=True)
class Case:
    """run: the result on one rank, of its tensor, its index tensor and the group. whole: all results, of all tensors.

    shape: of a rank's tensor, by rank and size. numbers: its index tensor. one_text: all ranks run the same graph.
    """

    name: str
    run: Callable[[Tensor, Tensor, Any, int], Tensor]
    whole: Callable[[Tensors, Tensors], Tensors]
    shape: Callable[[int, int], tuple[int, ...]] = lambda rank, size: (4, 3)
    numbers: Callable[[int, int], Sequence[int]] = lambda rank, size: (0,)
    one_text: bool = True

    def inputs(self, rank: int, size: int) -> tuple[Tensor, Tensor]:
        """The tensor of a rank, made of numbers that are its own, and its index tensor."""
        generator = torch.Generator().manual_seed(100 * size + rank)
        x = torch.randn(self.shape(rank, size), generator=generator, dtype=torch.float64)
        return x, torch.tensor(list(self.numbers(rank, size)))


def weights(y: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """What is different about a rank's loss."""
    weight = torch.linspace(-1, 1 + rank, y.numel(), dtype=y.dtype).view(y.shape)
    return weight, torch.tensor(rank + 1.0, dtype=y.dtype)


def weighted(y: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    return (weight * y).sin().sum() + scale * (y * y).sum()


def loss(y: Tensor, rank: int) -> Tensor:
    """Not linear, and another function on every rank."""
    return weighted(y, *weights(y, rank))


def _repeat(y: Tensor, size: int) -> Tensors:
    return [y] * size


def _sum(xs: Tensors) -> Tensor:
    return torch.stack(xs).sum(0)


def _gather(dim: int, ranks: Callable[[int], Sequence[int]] | None = None, label: str = "") -> Case:
    def run(x: Tensor, _: Tensor, group: Any, size: int) -> Tensor:
        return gc.all_gather(x, group, dim, ranks=ranks(size) if ranks else None)

    def whole(xs: Tensors, _: Tensors) -> Tensors:
        return _repeat(torch.cat([xs[i] for i in (ranks(len(xs)) if ranks else range(len(xs)))], dim), len(xs))

    return Case(f"all_gather dim {dim}{label}", run, whole, lambda rank, size: (2, 3, 2))


def _scatter(dim: int, op: str) -> Case:
    def whole(xs: Tensors, _: Tensors) -> Tensors:
        total = _sum(xs) / (len(xs) if op == "avg" else 1)
        return list(total.chunk(len(xs), dim))

    return Case(
        f"reduce_scatter dim {dim} {op}",
        lambda x, _, group, size: gc.reduce_scatter(x, group, dim, op),
        whole,
        lambda rank, size: tuple(2 * size if i == dim % 3 else 3 for i in range(3)),
    )


def _runs(xs: Tensors, splits: Sequence[Sequence[int]], capacity: int | None = None) -> list[Tensors]:
    """The rows that rank i sends to rank j, as [i][j]."""
    cut = [x[: sum(s)].split(list(s)) for x, s in zip(xs, splits, strict=True)]
    return [[run[:capacity] for run in runs] for runs in cut]


def _padded(rows: Tensor, count: int) -> Tensor:
    return torch.cat([rows, rows.new_zeros(count - rows.shape[0], *rows.shape[1:])])


def _splits(rank: int, size: int) -> list[int]:
    """How many rows go where: uneven, zeros among them."""
    return [(rank * 2 + to) % 4 for to in range(size)]


def _exact(name: str, run: Callable[[Tensor, Tensor, Any, int], Tensor]) -> Case:
    def whole(xs: Tensors, numbers: Tensors) -> Tensors:
        runs = _runs(xs, [n.tolist() for n in numbers])
        return [torch.cat([sent[to] for sent in runs]) for to in range(len(xs))]

    return Case(name, run, whole, lambda rank, size: (sum(_splits(rank, size)), 3), _splits, one_text=False)


ROWS = 9  # of a tensor whose runs are bounded; enough for every rank's splits


def _bounded(capacity: int) -> Case:
    def whole(xs: Tensors, numbers: Tensors) -> Tensors:
        runs = _runs(xs, [n.tolist() for n in numbers], capacity)
        return [_padded(torch.cat([sent[to] for sent in runs]), capacity * len(xs)) for to in range(len(xs))]

    return Case(
        f"all_to_all capacity {capacity}",
        lambda x, numbers, group, size: gc.all_to_all(x, group, input_splits=numbers, capacity=capacity).rows,
        whole,
        lambda rank, size: (ROWS, 3),
        _splits,
    )


def _there_and_back(x: Tensor, numbers: Tensor, group: Any, size: int) -> Tensor:
    sent = gc.all_to_all(x, group, input_splits=numbers, capacity=4)
    back = gc.all_to_all(sent.rows.sin(), group, input_splits=sent.counts, capacity=4)
    return back.rows


def _there_and_back_whole(xs: Tensors, numbers: Tensors) -> Tensors:
    return [_padded(x[: n.sum()].sin(), 4 * len(xs)) for x, n in zip(xs, numbers, strict=True)]


def _counts(size: int) -> list[int]:
    return [(3 * rank) % 4 for rank in range(size)]  # 0, 3, 2, 1


def _uneven(name: str, rows: Callable[[int, int], int], one_text: bool) -> Case:
    def whole(xs: Tensors, numbers: Tensors) -> Tensors:
        given = torch.cat([x[:n] for x, n in zip(xs, numbers[0].tolist(), strict=True)])
        return _repeat(_padded(given, 3 * len(xs)), len(xs))

    return Case(
        name,
        lambda x, numbers, group, size: gc.all_gather_uneven(x, group, numbers, 3),
        whole,
        lambda rank, size: (rows(rank, size), 2),
        lambda rank, size: _counts(size),
        one_text,
    )


CASES = [
    Case(
        "all_reduce sum",
        lambda x, _, group, size: gc.all_reduce(x, group),
        lambda xs, _: _repeat(_sum(xs), len(xs)),
    ),
    Case(
        "all_reduce avg",
        lambda x, _, group, size: gc.all_reduce(x, group, "avg"),
        lambda xs, _: _repeat(_sum(xs) / len(xs), len(xs)),
    ),
    Case(
        "all_reduce of a scalar",
        lambda x, _, group, size: gc.all_reduce(x, group, op="mean"),
        lambda xs, _: _repeat(_sum(xs) / len(xs), len(xs)),
        lambda rank, size: (),
    ),
    Case(
        "all_gather of scalars",
        lambda x, _, group, size: gc.all_gather(x, group),
        lambda xs, _: _repeat(torch.stack(xs), len(xs)),
        lambda rank, size: (),
    ),
    *(_gather(dim) for dim in (0, 1, 2, -1, -2, -3)),
    *(_gather(dim, lambda size: range(size - 1, -1, -1), " backwards") for dim in (0, 1)),
    *(_gather(dim, lambda size: [size - 1, 0][: size - 1], " some") for dim in (0, -1)),
    *(_scatter(dim, op) for dim in (0, 1, 2, -1, -3) for op in ("sum", "avg")),
    Case(
        "all_to_all equal",
        lambda x, _, group, size: gc.all_to_all(x, group),
        lambda xs, _: [torch.cat([x.chunk(len(xs))[to] for x in xs]) for to in range(len(xs))],
        lambda rank, size: (2 * size, 3),
    ),
    _exact("all_to_all exact tensor", lambda x, n, group, size: gc.all_to_all(x, group, input_splits=n)),
    _exact("all_to_all exact list", lambda x, n, group, size: gc.all_to_all(x, group, input_splits=n.tolist())),
    _exact(
        "all_to_all exact both",
        lambda x, n, group, size: gc.all_to_all(x, group, gc.all_to_all(n, group), n),
    ),
    *map(_bounded, (4, 2)),
    Case("all_to_all there and back", _there_and_back, _there_and_back_whole, lambda r, s: (ROWS, 3), _splits),
    Case(
        "broadcast",
        lambda x, _, group, size: gc.broadcast(x, group, size - 1),
        lambda xs, _: _repeat(xs[-1], len(xs)),
    ),
    _uneven("all_gather_uneven padded", lambda rank, size: 3, True),
    _uneven("all_gather_uneven short", lambda rank, size: _counts(size)[rank], False),
]
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "dense": lambda x: x,
    "transposed": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1) if x.dim() > 1 else x,
    "strided": lambda x: torch.stack([x, x], -1)[..., 0],
}
"""The same values with other strides."""


def reference(case: Case, size: int) -> tuple[Tensors, Tensors]:
    """All ranks' results, and the gradients of the sum of all ranks' losses, from one process."""
    inputs = [case.inputs(rank, size) for rank in range(size)]
    xs = [x.requires_grad_() for x, _ in inputs]
    results = case.whole(xs, [numbers for _, numbers in inputs])
    total = sum(loss(y, rank) for rank, y in enumerate(results))
    gradients = torch.autograd.grad(total, xs, allow_unused=True)  # type: ignore[arg-type]
    found = [torch.zeros_like(x) if g is None else g for x, g in zip(xs, gradients, strict=True)]
    return [y.detach() for y in results], found
