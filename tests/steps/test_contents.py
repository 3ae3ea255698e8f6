"""The ranks of a pipeline are given the same microbatches: their contents are compared once, at the first step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import graphcomp as gc
from graphcomp.errors import AgreementError
from graphcomp.testing import run_ranks

pytestmark = pytest.mark.gloo


def loss_fn(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> gc.TokenLoss:
    return gc.token_loss(output, batch["labels"])


def batch(seed: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {"input": torch.randn(3, 4, generator=draw), "labels": torch.randint(4, (3,), generator=draw)}


def on_rank(rank: int) -> list[Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    step = gc.compile_train_step(model, loss_fn, plan=gc.Plan(mesh=mesh, backend="eager", quiet=True))
    step.compile(batch(rank))  # examples may differ: they have no effect
    found: list[Any] = []
    for given in ([batch(1), batch(5 + rank)], [batch(1), batch(2)], [batch(3 + rank)]):
        try:
            found.append(float(step(given).loss))
        except AgreementError as error:
            found.append(str(error))
    return [*found, step.stats.steps]


def test_other_contents_are_refused_at_the_first_step_and_it_goes_on() -> None:
    first, second = run_ranks(on_rank, 2)
    for found in (first, second):
        assert "the ranks would not do the same" in found[0]
        assert "microbatch 1: contents of input" in found[0] and "microbatch 0" not in found[0]
        assert isinstance(found[1], float) and isinstance(found[2], float)  # later ones are not compared
        assert found[3] == 2
    assert first[1] == second[1]
