"""What is read of contents while something is traced: how often, and what is known of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Node

from graphcomp.capture.contents import FUNCTIONS, RULES, contents_read_once
from graphcomp.compat.reads import READ_NUMBERS, READ_SUM
from graphcomp.compat.symbols import fake_batch_leaf, new_fake_mode
from graphcomp.compat.tracing import trace


def reads(function: Callable[[Tensor], Tensor], dtype: torch.dtype = torch.float32) -> list[Node]:
    mode = new_fake_mode()
    x = fake_batch_leaf(mode, torch.ones(6, 4, dtype=dtype), "x")
    with mode, contents_read_once():
        graph = trace(function, (x,), rules=RULES, functions=FUNCTIONS).graph
    return [node for node in graph.nodes if node.target in (READ_NUMBERS, READ_SUM)]


def written_out_twice(x: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    y[x > 0] = x[x > 0] * 2
    y.add_(1)
    return (y + x)[(x > 0).logical_and(y > 0)].sum() + (y * x)[x > 0].sum()


def written_to(x: Tensor) -> Tensor:
    x = x.clone()
    first = x[x > 0].sum()
    x.add_(1)
    return first + x[x > 0].sum()


def written_to_by_a_view(x: Tensor) -> Tensor:
    x = x.clone()
    rows, part = x.view(-1), x[:2].detach()
    first = x[rows.view_as(x) > 0].sum()
    part.mul_(2)
    return first + x[rows.view_as(x) > 0].sum()


def written_to_as_data(x: Tensor) -> Tensor:
    mask = x > 0
    first = x[mask].sum()
    mask.data.logical_not_()
    return first + x[mask].sum()


def written_to_before(x: Tensor) -> Tensor:
    mask, other = x > 0, x > 0
    first = x[mask].sum()
    other.data.logical_not_()
    return first + x[other].sum()


def counts_written_to(x: Tensor) -> Tensor:
    counts = (x > 0).sum().view(1)
    first = torch.zeros(counts.tolist()[0]).sum()
    counts.data.add_(1)
    return first + torch.zeros(counts.tolist()[0]).sum()


def drawn(x: Tensor) -> Tensor:
    return x[torch.rand_like(x) > 0.5].sum() + x[torch.rand_like(x) > 0.5].sum()


@pytest.mark.parametrize(
    ("function", "times"),
    [
        (written_out_twice, 2),
        (written_to, 2),
        (written_to_by_a_view, 2),
        (written_to_as_data, 2),
        (written_to_before, 2),
        (counts_written_to, 2),
        (drawn, 2),
    ],
)
def test_equal_contents_are_read_once(function: Callable[[Tensor], Tensor], times: int) -> None:
    assert len(reads(function)) == times


def test_counts_are_known_not_to_be_negative() -> None:
    counts = reads(lambda x: torch.zeros(torch.nn.functional.one_hot(x[:, 0], 3).sum(0).tolist()[0]), torch.int64)
    assert [node.args[2] for node in counts] == ["0 <= n0\n0 <= n1\n0 <= n2"]
    (sums,) = reads(lambda x: x * x.sum().item(), torch.int64)
    assert sums.args == (sums.args[0],)


@pytest.mark.parametrize(
    "elements",
    [
        lambda x: torch.arange(0, -4, -1),
        lambda x: torch.arange(-4, 0),
        lambda x: torch.full((4,), x.shape[0] - 20),
        lambda x: (x[:, 0] > 0).long() + (x.shape[0] - 20),
        lambda x: torch.where(x[:, 0] > 0, -1, 1),
        lambda x: (x > 0).long().sum(0).to(torch.int8),
        lambda x: x.sort(0).values,
    ],
)
def test_what_may_be_negative_is_no_count(elements: Callable[[Tensor], Tensor]) -> None:
    (number,) = reads(lambda x: torch.ones(4) * elements(x).sum().item(), torch.int64)
    assert number.args == (number.args[0],)


def test_places_are_counts() -> None:
    (number,) = reads(lambda x: torch.zeros(x.sort(0).indices[0, 0].item()), torch.int64)
    assert number.args[2] == "0 <= n0"


def test_a_list_is_read_at_once() -> None:
    """torch's own fakes read each element of a list for itself."""
    before = FakeTensor.tolist
    assert len(reads(lambda x: x * sum(x[0].sum(0, keepdim=True).repeat(3).tolist()), torch.int64)) == 1
    assert FakeTensor.tolist is before
