"""Cases in which it matters that data ranks are processes: what each of them holds and says afterwards."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import graphcomp as gc
from graphcomp.plan import SCHEDULES
from graphcomp.testing import run_ranks
from tests.cases.test_denominators import Scale, padded, summed_where_valid
from tests.cases.test_parameters import squared
from tests.cases.tiny import PARAMETERS, dealt, divided, next_token, rows, step_of, tiny_gpt
from tests.sharing import shared_captures
from tests.steps.test_data_processes import full
from tests.zoo import ZOO

MESHES = {2: ((2,), ("dp",)), 4: ((2, 2), ("pp", "dp"))}


def plan_of(mesh: DeviceMesh | None, **options: Any) -> gc.Plan:
    return gc.Plan(mesh=mesh, backend="eager", quiet=True, **({"deadline": 60.0, **options}))


class Spare(nn.Module):
    """One layer takes no part, one is only looked at; both hold ones."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.spare, self.watched = nn.Linear(4, 4), nn.Linear(4, 4)
        for layer in (self.spare, self.watched):
            for parameter in layer.parameters():
                nn.init.ones_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        return self.second(x + self.watched(x).detach())


IDLE = ("spare.weight", "spare.bias", "watched.weight", "watched.bias")


def weighed(plan: gc.Plan, data_rank: int) -> tuple[float, int, dict[str, float], list[float]]:
    """Loss, tokens, gradients and shares of 22 in 8 tokens."""
    step = gc.compile_train_step(Scale(), summed_where_valid, plan=plan)
    result = step([[padded(1, 1, 1, 1), padded(9)], [padded(2, 2), padded(5)]][data_rank])
    gradients = {key: float(p.grad) for key, p in step.named_parameters() if p.grad is not None}
    return result.loss.item(), result.tokens["loss"].item(), gradients, list(map(float, result.microbatch_losses))


def decayed(plan: gc.Plan, batches: list[Tensor]) -> dict[str, Any]:
    """Two steps of AdamW, which shrinks every parameter that has a gradient, be it zero."""
    torch.manual_seed(0)
    model = Spare()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    step = gc.compile_train_step(model, squared, plan=plan)
    for _ in range(2):
        step(batches)
        optimizer.step()
        optimizer.zero_grad()
    step(batches)
    named = dict(model.named_parameters())
    return {
        "gradients": {key: named[key].grad for key in IDLE},
        "idle": {key: full(named[key]) for key in IDLE},
        "trained": {key: full(p) for key, p in step.named_parameters() if key not in IDLE},
    }


def repeated(plan: gc.Plan, batches: list[Any]) -> list[Any]:
    """Five equal steps that change nothing."""
    model = tiny_gpt()
    step = gc.compile_train_step(model, next_token, plan=plan)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    found = []
    for _ in range(5):
        loss = step(batches).loss
        found.append((loss, {key: full(p.grad) for key, p in step.named_parameters() if p.grad is not None}))
        optimizer.step()
        optimizer.zero_grad()
    return found


def on_rank(rank: int, world_size: int) -> dict[Any, Any]:
    mesh = init_device_mesh("cpu", MESHES[world_size][0], mesh_dim_names=MESHES[world_size][1])
    data_rank = mesh["dp"].get_local_rank()
    found: dict[Any, Any] = {}
    with shared_captures():
        for number, parameters in enumerate(PARAMETERS):
            for schedule in SCHEDULES:
                plan = plan_of(mesh, schedule=schedule, **parameters)
                found["weighed", number, schedule] = weighed(plan, data_rank)
            plan = plan_of(mesh, **parameters)
            found["decayed", number] = decayed(plan, dealt(INPUTS, 2)[data_rank])
            found["repeated", number] = repeated(plan, dealt(divided(rows(8), 4), 2)[data_rank])
    return found


INPUTS = [torch.arange(4.0 * n).reshape(n, 4) / 10 for n in (3, 2)]


@functools.cache
def ranks(world_size: int) -> list[dict[Any, Any]]:
    return run_ranks(on_rank, world_size, world_size, timeout=200)


WORLDS = pytest.mark.parametrize("world_size", list(MESHES))
HELD = pytest.mark.parametrize("number", range(len(PARAMETERS)), ids=[str(one) for one in PARAMETERS])


@pytest.mark.gloo
@pytest.mark.parametrize("schedule", SCHEDULES)
@HELD
@WORLDS
def test_one_denominator_on_every_rank(world_size: int, number: int, schedule: str) -> None:
    for rank, each in enumerate(ranks(world_size)):
        loss, tokens, gradient, shares = each["weighed", number, schedule]
        assert (loss, tokens) == (2.75, 8)
        assert shares == ([4 / 8, 9 / 8], [4 / 8, 5 / 8])[rank % 2]
        assert gradient == ({"w": 2.75} if rank < 2 else {})  # the first stage holds it


@pytest.mark.gloo
@HELD
@WORLDS
def test_parameters_that_take_no_part_are_not_decayed(world_size: int, number: int) -> None:
    expected = decayed(plan_of(None), INPUTS)
    for found in (expected, *(each["decayed", number] for each in ranks(world_size))):
        assert all(gradient is None for gradient in found["gradients"].values())
        assert all(torch.equal(value, torch.ones_like(value)) for value in found["idle"].values())
        for key, value in found["trained"].items():
            torch.testing.assert_close(value, expected["trained"][key], rtol=1e-5, atol=1e-6)
    held = {key for each in ranks(world_size) for key in each["decayed", number]["trained"]}
    assert expected["trained"].keys() == held


@pytest.mark.gloo
@HELD
@WORLDS
def test_equal_steps_are_bitwise_equal(world_size: int, number: int) -> None:
    for each in ranks(world_size):
        first, *others = each["repeated", number]
        assert torch.equal(first[0], ranks(world_size)[0]["repeated", number][0][0])
        for loss, gradients in others:
            assert torch.equal(loss, first[0])
            assert all(torch.equal(gradient, first[1][key]) for key, gradient in gradients.items())


@pytest.mark.parametrize("parameters", PARAMETERS, ids=str)
def test_several_stages_on_a_rank(parameters: dict[str, Any]) -> None:
    """Two pipelines of two ranks with two stages each, a weight on the first and the last: as four ranks, bitwise."""
    case, found = ZOO["tied_gpt"], []
    lines = [case.microbatches(3, 1), case.microbatches(3, 2)]
    for schedule in ("1f1b", "interleaved-1f1b"):
        step = step_of(case.build(), case.loss_fn, 4, schedule, data_ranks=2, **parameters)
        ran = step.run(lines)
        found.append({"loss": ran.result.loss, **ran.gradients})
    assert found[0].keys() == found[1].keys() and len(found[0]) > 10
    assert all(torch.equal(value, found[0][name]) for name, value in found[1].items())
