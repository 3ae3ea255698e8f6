"""Hooks: once a microbatch, in their order whatever the schedule; one that raises stops the step on all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import graphcomp as gc
from graphcomp.testing import HostSyncs, VirtualStep
from tests.zoo import ZOO

EAGER = gc.Plan(backend="eager", quiet=True)
CASE = ZOO["moe"]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("stages", [1, 3])
def test_once_a_microbatch_in_order(stages: int, schedule: str) -> None:
    step = VirtualStep(CASE.build(), CASE.loss_fn, plan=gc.Plan(stages=stages, schedule=schedule, backend="eager"))
    batches = CASE.microbatches(4)
    for number in range(2):
        seen: list[gc.MicrobatchResult] = []
        result = step.run(batches, "all", hooks=[seen.append]).result
        assert [(one.step, one.index) for one in seen] == [(number, index) for index in range(4)]
        assert [one.loss.item() for one in seen] == pytest.approx([x.item() for x in result.microbatch_losses])
        for name, loss in result.losses.items():
            assert sum(one.losses[name].item() for one in seen) == pytest.approx(loss.item())
        for name, value in result.metrics.items():
            each = torch.stack([one.metrics[name] for one in seen])
            kind = result.reductions[name]
            combined = {"sum": each.sum, "mean": each.mean, "max": each.amax, "min": each.amin}
            assert (each[-1] if kind == "last" else combined[kind]()).item() == pytest.approx(value.item())
        assert all(one.output is output for one, output in zip(seen, result.outputs, strict=True))


def test_values_are_lazy_and_the_handle_removes() -> None:
    step = gc.compile_train_step(CASE.build(), CASE.loss_fn, plan=EAGER)
    seen: list[gc.MicrobatchResult] = []
    first, second = step.on_microbatch(seen.append), step.on_microbatch(lambda one: None)
    step(CASE.microbatches(2))
    with HostSyncs() as syncs:
        step(CASE.microbatches(2))
    assert not syncs.found, syncs
    assert [(one.step, one.index) for one in seen] == [(0, 0), (0, 1), (1, 0), (1, 1)] and seen[0].output is None
    step.evaluate(CASE.microbatches(2))
    first.remove()
    step(CASE.microbatches(2))
    assert len(seen) == 4
    with step.on_microbatch(seen.append):
        step(CASE.microbatches(1))
    second.remove()
    step(CASE.microbatches(1))
    assert len(seen) == 5


def test_one_that_raises_stops_the_step() -> None:
    case = ZOO["batch_norm"]
    model = case.build()
    step = gc.compile_train_step(model, case.loss_fn, plan=EAGER)
    step(case.microbatches(2))
    before = {name: p.grad.clone() for name, p in model.named_parameters()}
    buffers = {name: b.clone() for name, b in model.named_buffers()}

    def hook(result: gc.MicrobatchResult) -> None:
        if result.index == 1:
            raise LookupError("no such document")

    handle = step.on_microbatch(hook)
    with pytest.raises(LookupError, match="no such document") as raised:
        step(case.microbatches(3))
    assert raised.value.__notes__ == ["in a hook, for microbatch 1 of step 1"]
    assert all(torch.equal(before[name], p.grad) for name, p in model.named_parameters())
    assert all(torch.equal(buffers[name], b) for name, b in model.named_buffers())
    assert step.stats.steps == 1
    handle.remove()
    step(case.microbatches(2))
    assert step.stats.steps == 2


def test_a_hook_sees_what_the_protocol_runs() -> None:
    from tests.trainer.speaking import Several, built, texts

    model = gc.compile(built(Several), plan=EAGER)
    seen: list[Any] = []
    model.step.on_microbatch(lambda one: seen.append(one.index))
    model.forward(model.prepare_batch(texts(5)))
    assert seen == [0, 1, 2]
