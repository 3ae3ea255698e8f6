"""Ranks that are late at random change nothing: neither bits, nor does anybody wait for ever.

Every instruction of a rank may begin a little late, and every step too, so that messages are sent, posted and awaited
in ever new orders; and they go now over channels, now over process groups, now over both. What counts is the order: the
delays are of the length of the work between them.
"""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import graphcomp as gc
import graphcomp.runtime.program.executor as executor
import graphcomp.runtime.program.transport as transport
from graphcomp.plan import SCHEDULES
from graphcomp.testing import VirtualStep, run_ranks
from tests.sharing import shared_captures
from tests.zoo import ZOO

CASE = ZOO["u_shape"]  # values that skip stages, and gradients that are summed on the way
NUMBERS = (4, 1, 3, 2)  # microbatches of the steps in turn: more and fewer than stages
LAYOUTS = {2: {"pp2": ((2,), ("pp",))}, 4: {"pp4": ((4,), ("pp",)), "pp2 x dp2": ((2, 2), ("pp", "dp"))}}
STAGES_PER_RANK = {"interleaved-1f1b": 2}
REPEATS = {"pp2": 200, "pp4": 120, "pp2 x dp2": 80}
MOST_BYTES = (transport.MOST_BYTES, 0, 600)
"""Of a message that goes over a channel: all of them, none, and some."""
LONGEST = 0.004
"""Seconds that a step may begin late; an instruction half of it, and only now and then."""


class Late:
    """Delays what a process does, by numbers of its own, while it is on."""

    def __init__(self, seed: int) -> None:
        self.draw, self.on, self.count = random.Random(seed), False, 0

    def wait(self, longest: float) -> None:
        if self.on:
            self.count += 1
            time.sleep(self.draw.uniform(0, longest))

    def link(self, original: Callable[..., Any], instruction: Any, context: Any) -> Any:
        operation = original(instruction, context)

        def late(state: Any) -> object:
            if self.draw.random() < 0.2:
                self.wait(LONGEST / 2)
            return operation(state)

        return late


def microbatches(number: int, data_rank: int = 0) -> list[Any]:
    return CASE.microbatches(number, 10 * number + data_rank)


Bits = tuple[float, dict[str, Tensor]]


def one_step(step: Any, model: Any, batches: list[Any]) -> Bits:
    model.zero_grad()
    loss = step(batches).loss.item()
    return loss, {name: p.grad for name, p in step.named_parameters()}


def same(one: Bits, two: Bits) -> bool:
    return one[0] == two[0] and all(torch.equal(one[1][name], gradient) for name, gradient in two[1].items())


def repeated(rank: int, world_size: int) -> dict[str, Any]:
    with shared_captures():
        return at_all_layouts(rank, world_size)


def at_all_layouts(rank: int, world_size: int) -> dict[str, Any]:
    """By layout and schedule: the bits without delays, and which repeats with delays had others."""
    late = Late(rank)
    executor.link = functools.partial(late.link, executor.link)
    found: dict[str, Any] = {}
    for layout, (shape, names) in LAYOUTS[world_size].items():
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        data_rank = mesh.get_local_rank("dp") if "dp" in names else 0
        for schedule in SCHEDULES:
            late.on, late.count = False, 0
            model = CASE.build()
            stages = STAGES_PER_RANK.get(schedule, 1) * mesh.size(names.index("pp"))
            plan = gc.Plan(mesh=mesh, stages=stages, schedule=schedule, backend="eager", quiet=True, deadline=60.0)
            step = gc.compile_train_step(model, CASE.loss_fn, plan=plan)
            bits = {number: one_step(step, model, microbatches(number, data_rank)) for number in NUMBERS}
            late.on, other = True, []
            for repeat in range(REPEATS[layout] // len(SCHEDULES)):
                number = NUMBERS[repeat % len(NUMBERS)]
                transport.MOST_BYTES = MOST_BYTES[repeat // len(NUMBERS) % len(MOST_BYTES)]
                late.wait(LONGEST)
                if not same(one_step(step, model, microbatches(number, data_rank)), bits[number]):
                    other.append(repeat)
            found[f"{layout} {schedule}"] = {"bits": bits, "other": other, "delays": late.count}
    return found


@pytest.mark.gloo
@pytest.mark.parametrize("world_size", LAYOUTS)
def test_delays_change_no_bit(world_size: int) -> None:
    ranks = run_ranks(repeated, world_size, world_size, timeout=150)
    assert len(ranks[0]) == len(SCHEDULES) * len(LAYOUTS[world_size])
    for key in ranks[0]:
        layout, schedule = key.rsplit(" ", 1)
        for one in ranks:
            assert one[key]["other"] == []
            assert one[key]["delays"] > REPEATS[layout]
        data_ranks = 2 if "dp" in layout else 1
        stages = STAGES_PER_RANK.get(schedule, 1) * world_size // data_ranks
        plan = gc.Plan(stages=stages, schedule=schedule, backend="eager", quiet=True)
        virtual = VirtualStep(CASE.build(), CASE.loss_fn, plan=plan, data_ranks=data_ranks)
        for number in NUMBERS:
            lines = [microbatches(number, data_rank) for data_rank in range(data_ranks)]
            ran = virtual.run(lines if data_ranks > 1 else lines[0])
            for one in ranks:
                assert same((ran.result.loss.item(), dict(ran.gradients)), one[key]["bits"][number])
