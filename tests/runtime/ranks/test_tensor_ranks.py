"""Which models tensor ranks can train under a plan; refused by name, without any effect."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from graphcomp.compat.sharded import shard_in_place
from graphcomp.compat.tensor_parallel import forget_meshes
from graphcomp.errors import PlanError
from graphcomp.plan import Plan
from graphcomp.runtime.ranks.tensor_ranks import check_parts
from tests.collectives.fake import fake_mesh


def layers(rows: int = 8) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, rows), nn.Linear(rows, 4))


def laid_out(mesh: Any, rows: int = 8) -> nn.Sequential:
    return parallelize_module(layers(rows), mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})


@pytest.fixture(autouse=True)
def _forgotten() -> Any:
    forget_meshes()
    yield
    forget_meshes()


def test_those_that_can() -> None:
    with fake_mesh(dp=2, tp=2) as mesh:
        for parameters in ("replicate", "shard"):
            plan = Plan(mesh=mesh, parameters=parameters)
            check_parts(plan, layers())
            check_parts(plan, laid_out(mesh["tp"]))
        split = laid_out(mesh["tp"])
        for module in split:
            for parameter in module.parameters():
                shard_in_place(parameter, torch.empty_like(parameter.to_local()[::2]), mesh["dp"], None)
        check_parts(plan, split)
        with pytest.raises(PlanError, match=r"'0\.weight' is laid out over another mesh than the plan's axis 'tp'"):
            check_parts(Plan(mesh=mesh), split)


def test_rows_that_no_layout_of_torch_can_name() -> None:
    with fake_mesh(dp=4, tp=2) as mesh:
        model = laid_out(mesh["tp"], rows=9)
        check_parts(Plan(mesh=mesh), model)
        with pytest.raises(PlanError) as caught:
            check_parts(Plan(mesh=mesh, parameters="shard"), model)
        text = str(caught.value)
        assert "the rows of '0.weight' cannot be split over the tensor ranks and each part over the data ranks" in text
        assert "expected: a multiple of 2 rows" in text and "got: 9 rows, tp=2, dp=4" in text


@pytest.mark.parametrize(("axis", "placement", "what"), [
    ("tp", Partial(), "laid out over the tensor ranks in a way"),
    ("dp", Replicate(), "laid out over another mesh"),
])  # fmt: skip
def test_other_layouts(axis: str, placement: Any, what: str) -> None:
    with fake_mesh(dp=2, tp=2) as mesh:
        model = layers()
        model[0].bias = nn.Parameter(DTensor.from_local(torch.ones(8), mesh[axis], [placement], run_check=False))
        with pytest.raises(PlanError, match=f"'0.bias' is {what}"):
            check_parts(Plan(mesh=mesh), model)


def test_a_mesh_that_is_not_the_plans() -> None:
    with fake_mesh(dp=2, tp=2) as mesh:
        model = laid_out(mesh["tp"])
        with pytest.raises(PlanError, match="of a mesh that is not the plan's"):
            check_parts(Plan(), model)
        model[0].weight = nn.Parameter(DTensor.from_local(torch.ones(4, 4), mesh["dp"], [Shard(0)], run_check=False))
        for wrong in (model, distribute_module(layers(), mesh)):
            with pytest.raises(PlanError, match=r"'0\.weight' is laid out over another mesh"):
                check_parts(Plan(mesh=mesh), wrong)
