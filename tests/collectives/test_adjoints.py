"""Results and gradients equal those of the global function in one process, in fp64, for 2, 3 and 4 ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from graphcomp import collectives as gc
from graphcomp.testing import HostSyncs, run_ranks
from tests.collectives.cases import CASES, LAYOUTS, Case, loss, reference


def assert_equal(name: str, found: Tensor, expected: Tensor) -> None:
    assert found.shape == expected.shape, name
    assert torch.allclose(found, expected, rtol=1e-12, atol=1e-12), f"{name}: {found} is not {expected}"


def one_rank(case: Case, rank: int, size: int, layout: str) -> tuple[Tensor, Tensor]:
    """This rank's result and gradient; the gradient that comes back has other strides too."""
    x, numbers = case.inputs(rank, size)
    x.requires_grad_()
    y = case.run(LAYOUTS[layout](x), numbers, dist.group.WORLD, size)
    loss(LAYOUTS[layout](y), rank).backward()
    assert x.grad is not None
    return y.detach(), x.grad


def all_cases(rank: int, size: int) -> dict[tuple[str, str], tuple[Tensor, Tensor]]:
    return {(case.name, layout): one_rank(case, rank, size, layout) for case in CASES for layout in LAYOUTS}


def everything(rank: int, size: int) -> dict[str, object]:
    return {
        "cases": all_cases(rank, size),
        "c22": c22(rank, size),
        "exact syncs": exact_syncs(size),
        "other syncs": other_syncs(size),
        "twice": second_derivative(rank),
        "expanded": expanded_gradient(rank),
    }


def c22(rank: int, size: int) -> list[list[float]]:
    """x -> a collective -> times (rank + 1) -> sum."""
    gradients: list[list[float]] = []
    for run in (
        lambda x: gc.all_reduce(x, dist.group.WORLD),
        lambda x: gc.reduce_scatter(x, dist.group.WORLD),
        lambda x: gc.reduce_scatter(x, dist.group.WORLD, op="avg"),
    ):
        x = torch.ones(2 * size, dtype=torch.float64, requires_grad=True)
        (run(x) * (rank + 1)).sum().backward()
        gradients.append([] if x.grad is None else x.grad.tolist())
    return gradients


def exact_syncs(size: int) -> list[int]:
    """Host synchronisations of: equal, lists, tensors, one tensor, bounded."""
    group, counts = dist.group.WORLD, []
    x = torch.arange(2.0 * size).view(-1, 1)
    twos = [2] * size
    for run in (
        lambda: gc.all_to_all(x, group),
        lambda: gc.all_to_all(x, group, twos, twos),
        lambda: gc.all_to_all(x, group, torch.tensor(twos), torch.tensor(twos)),
        lambda: gc.all_to_all(x, group, input_splits=torch.tensor(twos)),
        lambda: gc.all_to_all(x, group, input_splits=torch.tensor(twos), capacity=2),
    ):
        before = gc.host_syncs()
        run()
        counts.append(gc.host_syncs() - before)
    return counts


def other_syncs(size: int) -> str:
    """What run-time splits and counts make the host wait for, forward and backward."""
    group = dist.group.WORLD
    x = torch.ones(2 * size, 3, requires_grad=True)
    twos = torch.full((size,), 2)
    with HostSyncs() as seen:
        sent = gc.all_to_all(x, group, input_splits=twos, capacity=3)
        rows = gc.all_gather_uneven(sent.rows[:3], group, sent.counts, 3)
        gc.all_reduce(rows.sum(), group).backward()
    return str(seen)


def second_derivative(rank: int) -> tuple[float, float]:
    """Adjoints can be differentiated: L = sum over ranks of y**3, y = sum of x; d/dx of dL/dx."""
    x = torch.tensor(1.0 + rank, dtype=torch.float64, requires_grad=True)
    y = gc.all_reduce(x, dist.group.WORLD)
    (first,) = torch.autograd.grad(y**3, x, create_graph=True)
    (second,) = torch.autograd.grad(first, x)
    return first.item(), second.item()


def expanded_gradient(rank: int) -> Tensor:
    """The gradient of a sum has no strides of its own."""
    x = torch.ones(2, 3, dtype=torch.float64, requires_grad=True)
    (gc.all_reduce(x.expand(4, 2, 3), dist.group.WORLD).sum() * (rank + 1)).backward()
    assert x.grad is not None
    return x.grad


@pytest.mark.gloo
@pytest.mark.parametrize("size", [2, 3, 4])
def test_gradients_are_those_of_the_global_function(size: int) -> None:
    found = run_ranks(everything, size, size)
    for case in CASES:
        results, gradients = reference(case, size)
        for rank, one in enumerate(found):
            dense_result, dense_gradient = one["cases"][case.name, "dense"]
            assert_equal(f"{case.name}, result", dense_result, results[rank])
            assert_equal(f"{case.name}, gradient", dense_gradient, gradients[rank])
            for layout in LAYOUTS:
                result, _ = one["cases"][case.name, layout]
                assert torch.equal(result, dense_result), (case.name, layout)
                assert result.is_contiguous(), (case.name, layout)
    ranks_sum = size * (size + 1) / 2
    for rank, one in enumerate(found):
        assert one["exact syncs"] == [0, 0, 1, 1, 0]
        assert one["other syncs"] == "no host synchronisation"
        assert torch.equal(one["expanded"], torch.full((2, 3), 4 * ranks_sum, dtype=torch.float64))
        total = ranks_sum
        assert one["twice"] == pytest.approx((size * 3 * total**2, size**2 * 6 * total)), rank
    if size == 2:
        assert [one["c22"] for one in found] == [[[3.0] * 4, [1.0, 1.0, 2.0, 2.0], [0.5, 0.5, 1.0, 1.0]]] * 2
