"""Clipping against `torch.nn.utils.clip_grad_norm_` on the eager reference, tied parameters across stages included."""

from __future__ import annotations

import math

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import graphcomp as gc
from graphcomp.errors import PlanError
from graphcomp.testing import run_ranks
from tests.zoo import ZOO
from tests.zoo.reference import reference

CASES = [("tied_gpt", 0.1, 2.0), ("tied_gpt", 1e6, 2.0), ("half_frozen", 0.1, math.inf), ("gpt", 0.1, 1.0)]


def clipped(
    case_name: str, max_norm: float, norm_type: float, mesh: DeviceMesh | None = None
) -> tuple[float, dict[str, torch.Tensor]]:
    case = ZOO[case_name]
    model = case.build()
    plan = gc.Plan(mesh=mesh, backend="eager", quiet=True)
    step = gc.compile_train_step(model, case.loss_fn, plan=plan)
    step(case.microbatches(2))
    norm = gc.clip_grad_norm_(step, max_norm, norm_type)
    return float(norm), {name: p.grad for name, p in step.named_parameters() if p.grad is not None}


def on_rank(rank: int, world_size: int) -> list:
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("pp",))
    return [clipped(*case, mesh) for case in CASES]


def expected(case_name: str, max_norm: float, norm_type: float) -> tuple[float, dict[str, torch.Tensor]]:
    case = ZOO[case_name]
    model = case.build()
    gradients = reference(model, case.loss_fn, case.microbatches(2)).gradients
    for name, p in model.named_parameters():
        p.grad = gradients.get(name)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type)
    return float(norm), gradients


@pytest.mark.parametrize("case", CASES)
def test_one_stage_is_what_torch_computes(case: tuple) -> None:
    norm, gradients = clipped(*case)
    other, others = expected(*case)
    assert norm == other
    assert all(torch.equal(gradients[name], others[name]) for name in others)


@pytest.mark.gloo
def test_over_stages_each_parameter_counts_once() -> None:
    ranks = run_ranks(on_rank, 2, 2)
    for case, *found in zip(CASES, *ranks, strict=True):
        norm, gradients = expected(*case)
        assert found[0][0] == found[1][0], "the norm differs between ranks"
        assert math.isclose(found[0][0], norm, rel_tol=1e-6)
        assert set(found[0][1]) | set(found[1][1]) == set(gradients)
        for _, owned in found:
            for name, gradient in owned.items():
                assert torch.allclose(gradient, gradients[name], rtol=1e-5, atol=1e-9), name


def test_wrong_use() -> None:
    case = ZOO["mlp"]
    step = gc.compile_train_step(case.build(), case.loss_fn, plan=gc.Plan(backend="eager", quiet=True))
    with pytest.raises(PlanError, match="norm_type=0"):
        gc.clip_grad_norm_(step, 1.0, 0)
