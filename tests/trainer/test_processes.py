"""Real processes: the four lines at every layout, hooks that raise on one rank, an evaluation in between."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import graphcomp as gc
from graphcomp.errors import AgreementError, ArtifactError, NonFiniteError, RankFailure
from graphcomp.testing import run_ranks
from tests.sharing import shared_captures
from tests.trainer.speaking import Several, built, texts, train

STEPS = 3
ROWS = 8  # of a step, over all data ranks


def data(data_ranks: int, data_rank: int) -> list[Any]:
    """The same rows in every step, whatever the layout: each data rank has its part of them."""
    own = ROWS // data_ranks
    return [texts(ROWS, seed)[data_rank * own : (data_rank + 1) * own] for seed in range(STEPS)]


def four_lines(shape: tuple[int, int]) -> tuple[list[float], dict[str, Tensor], int]:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("pp", "dp"))
    user = built(Several, "token", 4)
    model = gc.compile(user, plan=gc.Plan(mesh=mesh, backend="eager", quiet=True, deadline=60.0))
    losses = train(model, user.parameters(), data(shape[1], mesh.get_local_rank("dp")))
    with torch.no_grad():
        out = model.forward(model.prepare_batch(data(shape[1], mesh.get_local_rank("dp"))[0]))
    losses.append(out.loss.item())
    return losses, {name: p.detach() for name, p in model.named_parameters()}, model.step.stats.traces


def raising(result: gc.MicrobatchResult, rank: int) -> None:
    if rank == 1 and result.index == 1:
        raise LookupError("no such document")


def stops(rank: int, world_size: int) -> list[str]:
    """What goes wrong on one rank, and that the step goes on afterwards."""
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("pp",))
    user = built(Several, "token", 4)
    plan = gc.Plan(mesh=mesh, backend="eager", quiet=True, deadline=60.0, check_finite=True)
    model = gc.compile(user, plan=plan)
    batch = model.prepare_batch(texts(4))
    said = []

    def attempt() -> None:
        before = {name: p.grad for name, p in user.named_parameters()}
        try:
            model.forward(batch).loss.backward()
            said.append("went well")
        except (LookupError, RankFailure, NonFiniteError, AgreementError) as error:
            assert all(before[name] is p.grad for name, p in user.named_parameters())
            said.append(f"{type(error).__name__}: {error}")

    attempt()
    with model.step.on_microbatch(functools.partial(raising, rank=rank)):
        attempt()
    attempt()
    kept = user.blocks[0].weight.detach().clone()
    with torch.no_grad():
        user.blocks[0].weight.fill_(torch.nan)
    attempt()
    with torch.no_grad():
        user.blocks[0].weight.copy_(kept)
    attempt()
    return said


def starts_again(rank: int, world_size: int, folder: str, axis: str, **options: Any) -> dict[str, Any]:
    """A second start with the programs of the first; and one whose programs are those of another model on one rank."""
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=(axis,))
    plan = gc.Plan(mesh=mesh, backend="eager", quiet=True, deadline=60.0, **options)
    mine = data(world_size, rank) if axis == "dp" else data(1, 0)
    found = []
    for saved in (None, folder):
        model = gc.compile(built(Several, "token", 4), plan=plan, saved=saved)
        losses = train(model, model.model.parameters(), mine)
        with torch.no_grad():
            losses.append(model.forward(model.prepare_batch(mine[0])).loss.item())
        found.append((losses, model.step.stats.traces))
        model.step.save(folder)
    other = built(Several, "scalar" if rank == 1 else "token", 4)
    try:
        gc.compile(other, plan=plan, saved=folder)
    except (ArtifactError, RankFailure) as error:
        return {"found": found, "error": f"{type(error).__name__}: {error}"}
    return {"found": found, "error": "none"}


def everything(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    with shared_captures():
        return in_turn(rank, world_size, folder)


def in_turn(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    if world_size == 4:
        return {"pp2 dp2": four_lines((2, 2))}
    found: dict[str, Any] = {"pp2": four_lines((2, 1)), "dp2": four_lines((1, 2)), "stops": stops(rank, world_size)}
    again = starts_again(rank, world_size, f"{folder}/pp", "pp")
    sharded = starts_again(rank, world_size, f"{folder}/dp", "dp", parameters="shard")
    return found | {"again": again, "sharded again": sharded}


@pytest.mark.gloo
@pytest.mark.parametrize("world_size", [2, 4])
def test_one_text_at_every_layout(world_size: int, tmp_path: Path) -> None:
    found = run_ranks(everything, world_size, world_size, str(tmp_path), timeout=120)
    alone = built(Several, "token", 4)
    model = gc.compile(alone, plan=gc.Plan(backend="eager", quiet=True))
    expected = train(model, alone.parameters(), data(1, 0))
    with torch.no_grad():
        expected.append(model.forward(model.prepare_batch(data(1, 0)[0])).loss.item())
    parameters = dict(alone.named_parameters())
    for layout in found[0].keys() - {"stops", "again", "sharded again"}:
        for losses, owned, traces in (one[layout] for one in found):
            assert losses == pytest.approx(expected, rel=1e-9), layout
            for name, value in owned.items():
                torch.testing.assert_close(value, parameters[name].detach(), rtol=1e-9, atol=1e-12)
            assert traces == 2
        assert {name for one in found for name in one[layout][1]} == parameters.keys()
    if world_size == 2:
        for rank, said in enumerate(one["stops"] for one in found):
            assert [said[0], said[2], said[4]] == ["went well"] * 3
            assert said[1].startswith("LookupError" if rank == 1 else "RankFailure: rank 1 could not run its hooks")
            assert "no such document" in said[1]
            assert said[3].startswith("NonFiniteError: step 2 yields a value that is not finite")
            assert "stage 0 of data rank 0, microbatch 0, forward" in said[3]
        for rank, again in [(rank, one[kind]) for kind in ("again", "sharded again") for rank, one in enumerate(found)]:
            (losses, traces), (later, none) = again["found"]
            assert losses == later and (traces, none) == (2, 0)
            what = ("rank 1 could not take over", "the saved programs are of another model")[rank]
            assert again["error"].startswith(f"ArtifactError: {what}")
            assert "attribute 'kind': was str 'token', is str 'scalar'" in again["error"]
