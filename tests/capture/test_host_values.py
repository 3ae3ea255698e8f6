"""Numbers that Python holds while a step is captured: drawn ones are refused, floats are told apart exactly."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from graphcomp import Plan, testing
from graphcomp.capture.batch import batch_key
from graphcomp.errors import CaptureError


class Noisy(nn.Linear):
    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__(2, 2)
        self.draw = draw

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.draw()


@pytest.mark.parametrize(("draw", "name"), [(random.random, "random"), (np.random.rand, "numpy.random")])
def test_a_number_drawn_in_python_is_refused(draw: Callable[[], float], name: str) -> None:
    with pytest.raises(CaptureError, match=f"draws a number from the module {name}, which a program would repeat"):
        testing.run_virtual(Noisy(draw), lambda o, b: o.sum(), [torch.ones(3, 2)], plan=Plan(backend="eager"))


def test_floats_are_told_apart_exactly() -> None:
    def key(value: float) -> object:
        return batch_key({"rate": value})[0]

    assert key(0.0) != key(-0.0)
    assert key(float("nan")) == key(float("nan"))
    assert key(1.0) != key(1)
