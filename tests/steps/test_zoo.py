"""Every zoo model, at every number of stages, schedule and number of microbatches, in virtual ranks."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from graphcomp import Plan
from graphcomp.testing import VirtualStep
from tests.steps.uncut import run_uncut
from tests.wide import diagonal
from tests.zoo import ZOO
from tests.zoo.reference import reference

RUNS = [("gpipe", (1, 3)), ("1f1b", (2, 5)), ("gpipe", (2, 5)), ("1f1b", (1, 3))]
"""Schedule, and the microbatches of the steps of one cut."""


@functools.cache
def built(name: str, dtype: torch.dtype):
    return ZOO[name].build(0).to(dtype)


@functools.cache
def eager(name: str, number: int, dtype: torch.dtype):
    torch.manual_seed(11)
    return reference(built(name, dtype), ZOO[name].loss_fn, ZOO[name].microbatches(number, 3, dtype))


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    scale = float(expected.abs().max()) if expected.numel() else 0.0
    return float((found.double() - expected.double()).abs().max()) / (scale or 1.0) if expected.numel() else 0.0


def others() -> Iterator[Any]:
    """Each model with one of these; with all of them where tests run wide. Four stages are on two ranks."""
    runs = [(4, ("interleaved-1f1b", (2, 5))), (3, ("eager-1f1b", (3, 5))), (4, ("interleaved-1f1b", (1, 3)))]
    for one in diagonal(list(ZOO), runs):
        name, (stages, run) = one.values
        yield pytest.param(name, stages, run, marks=one.marks)


@pytest.mark.parametrize(("name", "stages", "run"), [*diagonal(list(ZOO), (1, 2, 3, 4), RUNS), *others()], ids=str)
def test_every_cut_equals_the_uncut_program_and_eager(name: str, stages: int, run: tuple[str, tuple[int, ...]]) -> None:
    case, model, (schedule, numbers) = ZOO[name], built(name, torch.float32), run
    plan = Plan(stages=stages, schedule=schedule, backend="eager", quiet=True)
    virtual = VirtualStep(model, case.loss_fn, plan=plan)
    for number in numbers:
        microbatches = case.microbatches(number, 3)
        before = {key: buffer.clone() for key, buffer in model.named_buffers()}
        torch.manual_seed(11)
        ran = virtual.run(microbatches)
        after = {key: buffer.clone() for key, buffer in model.named_buffers()}
        for key, buffer in model.named_buffers():
            buffer.copy_(before[key])
        torch.manual_seed(11)
        uncut = run_uncut(model, virtual.latest, _denominators(ran))
        several = {
            key
            for cut in virtual.latest[0].specialisation.partitions.values()
            for key, users in cut.parameter_stages.items()
            if len(users) > 1
        }
        assert ran.gradients.keys() == uncut.gradients.keys()
        for key, gradient in uncut.gradients.items():
            if key in several:  # summed stage by stage at the end of the step: another order of additions
                assert relative(ran.gradients[key], gradient) < 1e-6, key
            else:
                assert torch.equal(ran.gradients[key], gradient), key
        for key, buffer in uncut.buffers.items():
            assert torch.equal(after[key], buffer), key
        expected = eager(name, number, torch.float32)
        if not (case.random and stages > 1):  # cut programs draw by their own rule
            _equals_eager(ran, expected, model, 1e-6)
        for key, buffer in expected.buffers.items():
            assert relative(after[key], buffer) < 1e-6, key


@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize("name", ZOO)
def test_in_double_precision_every_cut_equals_eager(name: str, stages: int) -> None:
    case, model = ZOO[name], built(name, torch.float64)
    if case.random and stages > 1:
        model.eval()  # no draws: what remains is deterministic
    plan = Plan(stages=stages, backend="eager", quiet=True)
    before = {key: buffer.clone() for key, buffer in model.named_buffers()}
    torch.manual_seed(11)
    expected = reference(model, case.loss_fn, case.microbatches(3, 3, torch.float64))
    torch.manual_seed(11)
    ran = VirtualStep(model, case.loss_fn, plan=plan).run(case.microbatches(3, 3, torch.float64))
    for key, buffer in model.named_buffers():
        buffer.copy_(before[key])
    model.train()
    _equals_eager(ran, expected, model, 1e-12)


def _denominators(ran) -> dict[str, torch.Tensor]:
    return {name: torch.where(count == 0, 1, count) for name, count in ran.result.tokens.items()}


def _equals_eager(ran, expected, model, tolerance: float) -> None:
    assert relative(ran.result.loss, expected.loss) < tolerance
    for key, loss in expected.losses.items():
        assert relative(ran.result.losses[key], loss) < tolerance, key
    for key, metric in expected.metrics.items():
        assert relative(ran.result.metrics[key], torch.as_tensor(metric)) < tolerance, key
    for share, loss in zip(ran.result.microbatch_losses, expected.microbatch_losses, strict=True):
        assert relative(share, loss) < tolerance
    for key, gradient in expected.gradients.items():
        found = ran.gradients.get(key)
        assert (found is None) == (gradient is None), key
        if gradient is not None:
            assert relative(found, gradient) < tolerance, key
