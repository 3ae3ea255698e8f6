"""Clipping against `torch.nn.utils.clip_grad_norm_` on the eager reference, over stages and data ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import graphcomp as gc
from graphcomp.errors import PlanError
from graphcomp.runtime.ranks.layout import Layout, make_layout
from graphcomp.runtime.state.shards import shard_parameters
from graphcomp.testing import run_ranks
from tests.runtime.sharded import full
from tests.sharing import shared_captures
from tests.zoo import ZOO
from tests.zoo.reference import reference

CASES = [("tied_gpt", 0.1, 2.0), ("tied_gpt", 1e6, 2.0), ("tied_gpt", 0.1, 1.0), ("half_frozen", 0.1, math.inf)]


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
    with shared_captures():
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


# Over data ranks, with parameters that are sharded and others that are whole


class Held:
    """What clipping asks a step for. The model is that of one stage; both stages of a pipeline hold `shared`."""

    def __init__(self, layout: Layout, model: nn.Module) -> None:
        self.layout, self.model = layout, model

    def parameters(self) -> Iterator[nn.Parameter]:
        return self.model.parameters()

    def together(self, doing: str, work: Callable[[], torch.Tensor]) -> torch.Tensor:
        return work()

    def counted_parameters(self) -> Iterator[nn.Parameter]:
        named = self.model.named_parameters()
        return (p for name, p in named if name != "shared" or self.layout.rank == 0)


def stage(number: int, dtype: torch.dtype) -> nn.Module:
    """Uneven rows, a parameter without gradient, one without dimensions; the last stage's has no gradient at all."""
    model = nn.Module()
    drawn = torch.Generator().manual_seed(number)
    shapes = [(3, 2), (1,), (), (7, 3)] if number < 2 else [(2,)]
    for place, shape in enumerate(shapes):
        parameter = nn.Parameter(torch.zeros(shape, dtype=dtype))
        if place != 1 and number < 2:
            parameter.grad = torch.randn(shape, generator=drawn, dtype=torch.float64).to(dtype)
        model.register_parameter(f"weight{place}", parameter)
    model.shared = nn.Parameter(torch.zeros(2, 2, dtype=dtype))
    model.shared.grad = torch.full((2, 2), 0.5, dtype=dtype)
    return model


NORMS = [(norm_type, max_norm) for norm_type in (1.0, 2.0, 3.0, math.inf) for max_norm in (0.1, 1e6)]


def clips(rank: int, stages: int, data_ranks: int, shard: bool, dtype: torch.dtype) -> list:
    mesh = init_device_mesh("cpu", (stages, data_ranks), mesh_dim_names=("pp", "dp"))
    layout = make_layout(gc.Plan(mesh=mesh), nn.Linear(1, 1))
    found = []
    for norm_type, max_norm in NORMS:
        model = stage(layout.rank, dtype)
        if shard:
            shard_parameters(model, mesh["dp"])
        norm = gc.clip_grad_norm_(Held(layout, model), max_norm, norm_type)  # type: ignore[arg-type]
        assert type(norm) is torch.Tensor
        found.append((norm, {name: full(p.grad) for name, p in model.named_parameters() if p.grad is not None}))
    return [layout.rank, found]


@pytest.mark.gloo
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("stages", "data_ranks", "shard"), [(1, 2, False), (1, 3, True), (2, 2, True), (3, 1, False)])
def test_over_data_ranks_each_row_counts_once(stages: int, data_ranks: int, shard: bool, dtype: torch.dtype) -> None:
    ranks = run_ranks(clips, stages * data_ranks, stages, data_ranks, shard, dtype)
    tolerance = 1e-6 if dtype is torch.float32 else 1e-14
    for case, (norm_type, max_norm) in enumerate(NORMS):
        whole = [stage(number, dtype) for number in range(stages)]
        counted = [p for i, one in enumerate(whole) for n, p in one.named_parameters() if n != "shared" or i == 0]
        norm = torch.nn.utils.clip_grad_norm_(counted, max_norm, norm_type)
        for one in whole[1:]:
            one.shared.grad = whole[0].shared.grad
        for number, found in ranks:
            assert found[case][0].dtype is dtype
            assert torch.equal(found[case][0], ranks[0][1][case][0]), "the norm differs between ranks"
            assert math.isclose(float(found[case][0]), float(norm), rel_tol=tolerance)
            gradients = {name: p.grad for name, p in whole[number].named_parameters() if p.grad is not None}
            assert found[case][1].keys() == gradients.keys()
            for name, gradient in found[case][1].items():
                assert torch.allclose(gradient, gradients[name], rtol=10 * tolerance, atol=0), name


def test_wrong_use() -> None:
    case = ZOO["mlp"]
    step = gc.compile_train_step(case.build(), case.loss_fn, plan=gc.Plan(backend="eager", quiet=True))
    with pytest.raises(PlanError, match="norm_type=0"):
        gc.clip_grad_norm_(step, 1.0, 0)
