"""A stage's gradients are reduced over data ranks beside the backward of the lower stages of its rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import graphcomp as gc
from graphcomp.errors import ScheduleError
from graphcomp.ir.signature import Shard
from graphcomp.runtime.program.instructions import RankProgram, Reduce, Run, Unshard
from graphcomp.runtime.program.reductions import Part, reductions
from graphcomp.schedule.actions import parse
from graphcomp.testing import VirtualStep, run_ranks

PLAN: dict[str, Any] = {
    "split": ["1", "2", "3"],
    "schedule": "gpipe",
    "backend": "eager",
    "quiet": True,
    "bucket_bytes": 300,  # so that a stage has several buckets
}
COUNTS = (3, 2)
"""Microbatches of each data rank."""


def runs(text: str) -> list[Any]:
    return [parse(each) for each in text.split()]


def test_parts_stand_in_the_gaps_of_the_work_of_lower_stages() -> None:
    order = runs("2F0 2F1 2B0 2B1 1B0 1B1 0B0 0B1")
    behind, left = reductions([2, 1], order)
    assert {str(action): parts for action, parts in behind.items()} == {
        "2B1": [Part(2, 0, 3)],
        "1B0": [Part(2, 1, 3)],
        "1B1": [Part(2, 2, 3), Part(1, 0, 3)],
        "0B0": [Part(1, 1, 3)],
        "0B1": [Part(1, 2, 3)],
    }
    assert left == []


def test_a_stage_without_a_backward_keeps_its_place_in_the_order() -> None:
    behind, left = reductions([3, 2, 1], runs("2B0 0B0"))
    assert {str(action): parts for action, parts in behind.items()} == {
        "2B0": [Part(3), Part(2, 0, 2)],
        "0B0": [Part(2, 1, 2)],
    }
    assert left == [Part(1)]
    assert reductions([3, 1], []) == ({}, [Part(3), Part(1)])


def test_another_order_of_stages_is_refused() -> None:
    with pytest.raises(ScheduleError, match="descending order"):
        reductions([2, 1], runs("1B0 2B0 0B0"))


def model(tied: bool = False) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh()) for _ in range(4)]
    if tied:
        layers[3][0].weight = layers[1][0].weight
    return nn.Sequential(*layers)


def loss_fn(output: Tensor, batch: Tensor) -> gc.TokenLoss:
    return gc.TokenLoss(output.square().sum(), output.shape[0])


def microbatches(data_rank: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(data_rank)
    return [torch.randn(2 + number, 8, generator=draw) for number in range(COUNTS[data_rank])]


def virtual(
    tied: bool = False, data_ranks: int = 2, same: bool = False, **options: Any
) -> tuple[VirtualStep, dict[str, Tensor]]:
    """same: both data ranks have the microbatches of the first."""
    plan = gc.Plan(**{**PLAN, "stages_per_rank": 4, **options})
    step = VirtualStep(model(tied), loss_fn, plan=plan, data_ranks=data_ranks)
    given: Any = [microbatches(0 if same else rank) for rank in range(2)]
    return step, dict(step.run(given if data_ranks == 2 else [*given[0], *given[1]]).gradients)


def program_of(step: VirtualStep) -> RankProgram:
    bound = step.bind([microbatches(rank) for rank in range(2)])
    return bound.lines[0].prepared.programs.ranks[0]


@pytest.mark.parametrize("schedule", ["gpipe", "interleaved-1f1b"])
def test_each_stage_is_reduced_while_lower_ones_go_backward(schedule: str) -> None:
    step, gradients = virtual(schedule=schedule)
    order = [one for one in program_of(step).instructions if isinstance(one, Reduce | Run)]
    first = {one.stage: place for place, one in enumerate(order) if isinstance(one, Reduce) and one.part == 0}
    last = {one.stage: place for place, one in enumerate(order) if isinstance(one, Reduce)}
    ends = {one.stage: place for place, one in enumerate(order) if isinstance(one, Run) and one.kind != "forward"}
    for stage in (3, 2, 1):
        assert ends[stage] < first[stage] < ends[stage - 1] < last[stage], "it begins before their end and ends behind"
        assert last[stage] < first[stage - 1]
    assert first[0] == last[0] > ends[0]
    expected = virtual(data_ranks=1)[1]
    assert gradients.keys() == expected.keys()
    assert all(torch.allclose(gradients[name], expected[name], rtol=1e-5) for name in expected)


def test_a_parameter_of_two_stages_is_reduced_at_the_end() -> None:
    step, gradients = virtual(tied=True)
    instructions = program_of(step).instructions
    end = max(place for place, one in enumerate(instructions) if isinstance(one, Run))
    late = [one.stage for one in instructions[end:] if isinstance(one, Reduce) and one.parts == 1]
    assert late == [0, 1], "stage 1 holds it, and gets the share of stage 3 first"
    expected = virtual(tied=True, data_ranks=1)[1]
    assert all(torch.allclose(gradients[name], expected[name], rtol=1e-5) for name in expected)


def test_a_sharded_parameter_of_two_stages_of_a_rank_is_gathered_once() -> None:
    for regather, count in ((False, 1), (True, 2 * 2 * len(microbatches(0)))):
        step, gradients = virtual(tied=True, parameters="shard", regather=regather, same=True)
        program = step.bind([microbatches(0)] * 2).lines[0].prepared.programs.ranks[0]
        weight = next(bind.register for bind in program.binds if bind.role == Shard("1.0.weight"))
        assert sum(weight in one.arguments for one in program.instructions if isinstance(one, Unshard)) == count
        expected = virtual(tied=True, data_ranks=1, same=True)[1]
        assert all(torch.allclose(gradients[name], expected[name], rtol=1e-5) for name in expected)


def on_rank(rank: int, parameters: str) -> tuple[dict[str, Tensor], int]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    own = model()
    step = gc.compile_train_step(own, loss_fn, plan=gc.Plan(mesh=mesh, parameters=parameters, **PLAN))
    for _ in range(2):
        own.zero_grad()
        step(microbatches(rank))
    found = {n: p.grad.full_tensor() if parameters == "shard" else p.grad for n, p in own.named_parameters()}
    return found, step.stats.collectives


@pytest.mark.gloo
@pytest.mark.parametrize("parameters", ["replicate", "shard"])
def test_processes_equal_virtual_ranks(parameters: str) -> None:
    expected = virtual(parameters=parameters)[1]
    for gradients, collectives in run_ranks(on_rank, 2, parameters, timeout=120):
        assert all(torch.equal(gradients[name], expected[name]) for name in expected)
        assert collectives > 4 * 2
