"""What a step costs on the host beside its programs: the package's own Python calls, counted, for nothing is timed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest
import torch
from torch import nn

import graphcomp as gc
from graphcomp.testing import VirtualStep
from tests.zoo import ZOO

PACKAGE = str(Path(gc.__file__).parent)


def calls_in(run: Callable[[], object]) -> int:
    """How often functions of the package are entered."""
    count = 0

    def see(frame: FrameType, event: str, _: object) -> None:
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.startswith(PACKAGE)

    sys.setprofile(see)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize(("stages", "each"), [(1, 40), (2, 41), (4, 41)])
def test_calls_for_each_action_of_a_step_like_the_one_before(stages: int, each: int) -> None:
    """each: the bound, a bit above what it takes; counting the tokens and the interpreter's own are among them."""
    case = ZOO["tied_gpt"]
    step = VirtualStep(case.build(), case.loss_fn, plan=gc.Plan(stages=stages, backend="eager", quiet=True))
    given, found = case.microbatches(1) * 12, {}
    for number in (4, 12):
        step.run(given[:number])
        step.run(given[:number])
        found[number] = calls_in(lambda number=number: step.run(given[:number]))
    actions = 8 * (2 * stages - 1)
    assert (found[12] - found[4]) / actions <= each, (found, (found[12] - found[4]) / actions)


def test_calls_for_each_parameter() -> None:
    """Of all that a step does with a parameter, only what is written at its end is done one by one."""
    found = []
    for layers in (2, 6):
        model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(layers)))
        plan = gc.Plan(backend="eager", quiet=True)
        step = gc.compile_train_step(model, lambda output, _: output.square().mean(), plan=plan)
        batch = torch.randn(2, 3)
        for _ in range(2):
            step([batch])
            model.zero_grad()
        found.append(calls_in(lambda step=step, batch=batch: step([batch])))
    assert found[1] - found[0] <= 4 * 2, found
