"""Shared captures: equal models share one, and whatever a program depends on makes another."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphcomp.testing.captures import SharedCaptures


class Scaled(nn.Module):
    def __init__(self, scale: float = 2.0) -> None:
        super().__init__()
        self.linear, self.scale, self.constant = nn.Linear(3, 3), scale, None

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x) * self.scale
        return y if self.constant is None else y + self.constant


class Held(Scaled):
    """Has a tensor that is neither parameter nor buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.constant = torch.ones(3)


def loss(output: Tensor, batch: Any) -> Tensor:
    return output.square().mean()


def other_loss(output: Tensor, batch: Any) -> Tensor:
    return output.abs().mean()


BATCH = torch.ones(4, 3)


def test_models_that_are_built_alike_share() -> None:
    captures = SharedCaptures()
    first = captures(Scaled(), loss, BATCH)
    assert captures(Scaled(), loss, torch.zeros(4, 3)) is first
    assert captures.number == 1 and captures.seconds == first.seconds


@pytest.mark.parametrize(
    "changed",
    [
        (lambda: Scaled(3.0), loss, BATCH, {}),
        (lambda: Scaled().eval(), loss, BATCH, {}),
        (lambda: Scaled().double(), loss, BATCH.double(), {}),
        (lambda: Scaled().requires_grad_(False).train(), loss, BATCH, {"training": False}),
        (Scaled, other_loss, BATCH, {}),
        (Scaled, loss, torch.ones(5, 3), {}),
        (Scaled, loss, BATCH, {"training": False}),
    ],
)
def test_what_a_program_depends_on_makes_another(changed: Any) -> None:
    build, loss_fn, batch, options = changed
    captures = SharedCaptures()
    captures(Scaled(), loss, BATCH)
    captures(build(), loss_fn, batch, **options)
    assert captures.number == 2


def test_a_tensor_of_user_code_stays_with_its_model() -> None:
    captures, model = SharedCaptures(), Held()
    first = captures(model, loss, BATCH)
    assert captures(model, loss, BATCH) is first and list(first.captured)
    model.constant = torch.ones(4, 3)  # another form, of which no guard's facts tell
    assert captures(model, loss, BATCH) is not first
    other = captures(Held(), loss, BATCH)
    assert captures.number == 3 and other is not first


def test_a_limit_keeps_those_used_last() -> None:
    captures = SharedCaptures(limit=2)
    for scale in (1.0, 2.0, 1.0, 3.0, 1.0, 2.0):
        captures(Scaled(scale), loss, BATCH)
    assert captures.number == 4
