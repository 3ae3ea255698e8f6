"""The trace of a profiler names what each rank does; without a profiler nothing is opened."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

import graphcomp as gc
from graphcomp.compat import profiler
from graphcomp.testing import VirtualStep
from tests.zoo import ZOO

CASE = ZOO["mlp"]


def ranges(step: VirtualStep, batches: list[Any]) -> Counter[str]:
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        step.run(batches)
    found = {event.key: event.count for event in recorded.key_averages() if event.key.startswith("graphcomp: ")}
    return Counter({name.removeprefix("graphcomp: "): count for name, count in found.items()})


def test_ranges_are_named_by_stage_microbatch_and_action() -> None:
    step = VirtualStep(CASE.build(), CASE.loss_fn, plan=gc.Plan(stages=2, backend="eager", quiet=True))
    batches = CASE.microbatches(2)
    step.run(batches)
    found = ranges(step, batches)
    runs = {name for name in found if "microbatch" in name and name.startswith("stage")}
    assert runs == {
        *(f"stage 0 microbatch {m} {kind}" for m in (0, 1) for kind in ("forward", "backward")),
        *(f"stage 1 microbatch {m} fused" for m in (0, 1)),
    }
    sends = {name for name in found if name.startswith("send")}
    assert sends == {f"send {edge} microbatch {m}" for edge in ("0>1", "1>0") for m in (0, 1)}
    assert all(f"wait 0>1 microbatch {m}" in found for m in (0, 1))


def test_step_programs_have_ranges() -> None:
    plan = gc.Plan(stages=1, backend="eager", parameters="shard", quiet=True)
    step = VirtualStep(CASE.build(), CASE.loss_fn, plan=plan, data_ranks=2)
    found = ranges(step, [CASE.microbatches(1), CASE.microbatches(1, 1)])
    assert {"stage 0 unshard", "stage 0 reduce"} <= set(found)


def test_nothing_is_opened_without_a_profiler(monkeypatch: Any) -> None:
    opened: list[str] = []
    monkeypatch.setattr(profiler.profiler, "record_function", opened.append)
    step = gc.compile_train_step(CASE.build(), CASE.loss_fn, plan=gc.Plan(backend="eager", quiet=True))
    step(CASE.microbatches(2))
    assert not opened
    assert not torch.autograd.profiler._is_profiler_enabled
