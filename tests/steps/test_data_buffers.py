"""Buffers over data ranks that are processes: equal on all of them, and those of one process."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphcomp as gc
from graphcomp.testing import check_parity, run_ranks
from tests.steps.test_data_processes import mesh_of, plan_of
from tests.zoo import ZOO

CASE = ZOO["batch_norm"]
COUNTS = ((3, 1), (1, 3))
RUNS = [("dp2 x pp2", "replicate", "eager"), ("pp2 x dp2", "shard", "eager"), ("dp2", "shard", "inductor")]


def microbatches(number: int) -> list[Any]:
    return CASE.microbatches(4, number, torch.float64)


class Fixed(nn.Module):
    """Has a buffer that each process draws for itself, and one that shows one row many times."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = CASE.build().double()
        self.register_buffer("shift", torch.randn(3, 5, dtype=torch.float64).t()[:, :1], persistent=False)
        self.register_buffer("row", torch.randn(5, dtype=torch.float64).expand(2, 5))

    def forward(self, x: Tensor) -> Tensor:
        return self.norms(x) + self.shift.sum(1) + self.row.sum(0)


def trained(layout: str, mode: str, backend: str) -> dict[str, Any]:
    mesh = mesh_of(layout)
    data_rank = mesh["dp"].get_local_rank()
    torch.manual_seed(data_rank)
    model = Fixed()
    with torch.no_grad():
        model.norms.norm1.running_mean += data_rank
    step = gc.compile_train_step(model, CASE.loss_fn, plan=plan_of(mesh, mode, backend=backend))
    found: dict[str, Any] = {"losses": []}
    for number, counts in enumerate(COUNTS):
        given = microbatches(number)
        found["losses"].append(step(given[: counts[0]] if data_rank == 0 else given[counts[0] :]).loss.item())
        found.setdefault("collectives", step.stats.collectives)
    if backend == "eager":
        rows = check_parity(model, CASE.loss_fn, microbatches(2)[data_rank::2], step=step)
        found["parity"] = {row.name: row.relative for row in rows if row.kind == "buffer"}
    owns = step.owner()
    found["evaluated"] = step.evaluate(microbatches(3)).loss.item()
    found["buffers"] = {name: buffer.clone() for name, buffer in model.named_buffers() if owns(name)}
    found["text"] = step.explain()
    return found


def everything(rank: int, world_size: int) -> list[dict[str, Any]]:
    size = {"dp2": 2}
    return [trained(*run) if size.get(run[0], 4) == world_size else {} for run in RUNS]


@functools.cache
def processes(number: int) -> list[list[dict[str, Any]]]:
    return run_ranks(everything, number, number, timeout=200)


@functools.cache
def alone() -> nn.Module:
    """What data rank 0 begins with, through all microbatches in order."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Fixed()
    for number in range(len(COUNTS)):
        for batch in microbatches(number):
            model(batch[0])
    return model


@pytest.mark.gloo
@pytest.mark.parametrize(
    "run",
    [pytest.param(run, marks=[pytest.mark.inductor] * (run[2] == "inductor"), id=" ".join(run)) for run in RUNS],
)
def test_all_data_ranks_have_the_buffers_of_one_process(run: tuple[str, str, str]) -> None:
    number = 2 if run[0] == "dp2" else 4
    found, expected = [each[RUNS.index(run)] for each in processes(number)], dict(alone().named_buffers())
    assert set().union(*(one["buffers"] for one in found)) == set(expected)
    for one in found:
        assert one["losses"] == found[0]["losses"] and one["evaluated"] == found[0]["evaluated"]
        for name, buffer in one["buffers"].items():
            torch.testing.assert_close(buffer, expected[name], rtol=1e-12, atol=1e-12, msg=name)
            copies = [other["buffers"][name] for other in found if name in other["buffers"]]
            assert len(copies) >= 2 and all(torch.equal(buffer, other) for other in copies), name
        assert all(relative <= 1e-12 for relative in one.get("parity", {}).values())
        assert "update" in one["text"] and "broadcast" in one["text"]
    if number == 4:
        assert {name for one in found for name in one["parity"]} == set(expected) - {"shift", "row"}
