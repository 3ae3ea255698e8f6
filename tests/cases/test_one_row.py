"""Rows of which a mask picks one, or another mask as many: what eager code decides on 1 is checked, not assumed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphcomp as gc
from graphcomp.errors import GuardError
from graphcomp.testing import run_virtual


class Model(nn.Module):
    def __init__(self, code: Callable[[Any, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.code = nn.Linear(4, 4), nn.Linear(4, 4), code

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.last(self.code(self, self.first(x), mask))


def batch(*picked: int) -> dict[str, Tensor]:
    mask = torch.zeros(5, dtype=torch.bool)
    mask[list(picked)] = True
    return {"x": torch.randn(5, 4), "mask": mask, "labels": torch.arange(5) % 4}


def squares(output: Tensor, batch: dict[str, Tensor]) -> gc.MeanLoss:
    return gc.mean_loss(output.square().mean())


def compare(code: Any, loss_fn: Any, batches: list[dict[str, Tensor]], stages: int) -> None:
    model, eager = Model(code), Model(code)
    result, gradients = run_virtual(model, loss_fn, batches, plan=gc.Plan(backend="eager", quiet=True, stages=stages))
    losses = [loss_fn(eager(one["x"], one["mask"]), one) for one in batches]
    if isinstance(losses[0], gc.TokenLoss):
        expected = sum(one.total for one in losses) / sum(one.tokens for one in losses)
    else:
        expected = torch.stack([one.value for one in losses]).mean()
    expected.backward()
    torch.testing.assert_close(result.loss.float(), expected.detach(), equal_nan=True)
    for name, parameter in eager.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, equal_nan=True)


def by_name(model: Model, h: Tensor, mask: Tensor) -> Tensor:
    return h[mask.nonzero().squeeze(1)] + h[mask][:, None].squeeze(-2)


def from_the_end(model: Model, h: Tensor, mask: Tensor) -> Tensor:
    return h[mask.nonzero().squeeze(-1)]


@pytest.mark.parametrize("code", [by_name, from_the_end])
@pytest.mark.parametrize("stages", [1, 2])
def test_a_named_dimension_is_squeezed(code: Any, stages: int) -> None:
    compare(code, squares, [batch(0, 2, 3), batch(1)], stages)


def all_of_them(model: Model, h: Tensor, mask: Tensor) -> Tensor:
    return h[mask.nonzero().squeeze()]


def the_rows(model: Model, h: Tensor, mask: Tensor) -> Tensor:
    return h[mask].squeeze(0).sum(0)


def several(model: Model, h: Tensor, mask: Tensor) -> Tensor:
    return h[mask].sum(1, keepdim=True).squeeze((0, 1)).sum() + h


def in_place(model: Model, h: Tensor, mask: Tensor) -> Tensor:
    return h[mask.nonzero().squeeze_()]


@pytest.mark.parametrize("code", [all_of_them, the_rows, several, in_place])
def test_rows_that_squeeze_would_drop_are_checked(code: Any) -> None:
    compare(code, squares, [batch(0, 2, 3), batch(1, 2)], 1)
    with pytest.raises(GuardError) as error:
        run_virtual(Model(code), squares, [batch(0, 2), batch(1)], plan=gc.Plan(backend="eager", quiet=True))
    assert f"where: test_one_row.py:{code.__code__.co_firstlineno + 1}" in str(error.value)
    assert "expected: n0 != 1\n  got: n0 = 1\n" in str(error.value)
    assert ".squeeze(1), or use .flatten()" in str(error.value)


def labels_of_another_mask(output: Tensor, batch: dict[str, Tensor]) -> gc.TokenLoss:
    return gc.token_loss(output, batch["labels"][batch["mask"] & (batch["labels"] >= 0)])


@pytest.mark.parametrize("stages", [1, 2])
def test_labels_that_are_as_many_as_rows(stages: int) -> None:
    compare(from_the_end, labels_of_another_mask, [batch(0, 2, 3), batch(1)], stages)


def test_labels_that_are_fewer_than_rows() -> None:
    def fewer(output: Tensor, batch: dict[str, Tensor]) -> gc.TokenLoss:
        return gc.token_loss(output, batch["labels"][batch["mask"] & (batch["labels"] > 0)])

    with pytest.raises(GuardError, match="do not fit together") as error:
        run_virtual(Model(from_the_end), fewer, [batch(1, 2), batch(0, 2)], plan=gc.Plan(backend="eager", quiet=True))
    read = f"test_one_row.py:{from_the_end.__code__.co_firstlineno + 1}"
    assert f"expected: s1 == n0, where s1 is read at {read}\n  got: n0 = 1, s1 = 2\n" in str(error.value)


def spread(model: Model, h: Tensor, mask: Tensor) -> Tensor:
    return h / (h[mask].std(0) + 1)


def even_spread(model: Model, h: Tensor, mask: Tensor) -> Tensor:
    return h / (h[mask].var(0, correction=0) + 1)


def test_gradient_of_the_spread_of_one_row() -> None:
    compare(spread, squares, [batch(0, 2, 3), batch(1, 2)], 1)
    compare(even_spread, squares, [batch(0, 2, 3), batch(1)], 1)
    with pytest.raises(GuardError, match="correction=0") as error:
        run_virtual(Model(spread), squares, [batch(0, 2), batch(1)], plan=gc.Plan(backend="eager", quiet=True))
    assert f"where: test_one_row.py:{spread.__code__.co_firstlineno + 1}" in str(error.value)


def the_last(model: Model, h: Tensor, mask: Tensor) -> Tensor:
    return h[-mask.sum().item() :] * 2


def but_the_last(model: Model, h: Tensor, mask: Tensor) -> Tensor:
    return h[: -mask.sum().item()].sum(0) + h


def as_many_less(model: Model, h: Tensor, mask: Tensor) -> Tensor:
    n = mask.sum().item()
    return h[: h.shape[0] - n].sum(0) + h[5 - n :].sum(0)


def test_places_that_are_differences() -> None:
    compare(as_many_less, squares, [batch(0, 2, 3), batch(), batch(0, 1, 2, 3, 4)], 1)


@pytest.mark.parametrize("code", [the_last, but_the_last])
def test_places_from_the_end_that_are_read(code: Any) -> None:
    for stages in (1, 2):
        compare(code, squares, [batch(0, 2, 3), batch(1), batch(0, 1, 2, 3, 4)], stages)
    with pytest.raises(GuardError) as error:
        run_virtual(Model(code), squares, [batch(0, 2), batch()], plan=gc.Plan(backend="eager", quiet=True))
    assert f"where: test_one_row.py:{code.__code__.co_firstlineno + 1}" in str(error.value)
