"""Four processes with tensor ranks: built on meta, filled from files and dicts, saved, and gone on with elsewhere."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

import graphcomp as gc
from graphcomp.testing import run_ranks
from tests.cases.test_tensor_parallel import GPT, SHAPES, batch_of, build, laid_out, loss_fn
from tests.checkpoint.test_processes import RealBytes, local_bytes, message, whole

pytestmark = pytest.mark.gloo

LAYOUTS = {"pp2 x tp2": ("pp", "tp"), "dp2 x tp2": ("dp", "tp"), "pp2 x dp2": ("pp", "dp")}
BLOCKS = 1
OTHERS = ("dp2 x tp2", "pp2 x dp2")
"""With sharded parameters, over data ranks and over tensor and data ranks."""
SEED = 5


def on_meta(blocks: int) -> GPT:
    with torch.device("meta"):
        return GPT(blocks).double()


class Job:
    """What a rank does at one layout; None: one process."""

    def __init__(self, layout: str | None, make: Any = on_meta, parameters: str = "replicate") -> None:
        mesh, self.numbers = None, range(len(SHAPES))
        if layout is not None:
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=LAYOUTS[layout])
            if "dp" in LAYOUTS[layout]:
                self.numbers = range(mesh.get_local_rank("dp"), mesh.get_local_rank("dp") + 1)
        tensor_ranks = layout is not None and "tp" in LAYOUTS[layout]
        self.model = laid_out(mesh["tp"], False, False, BLOCKS, make) if tensor_ranks else make(BLOCKS)
        plan = gc.Plan(mesh=mesh, parameters=parameters, backend="eager", quiet=True, deadline=60.0)
        self.step = gc.compile_train_step(self.model, loss_fn, plan=plan)
        self.step.compile(batch_of(self.numbers[0]))
        self.optimizer = torch.optim.AdamW(self.step.parameters(), lr=0.1)

    def train(self) -> list[float]:
        """Two steps: losses and norms of the gradients."""
        found = []
        for _ in range(2):
            found.append(float(self.step([batch_of(number) for number in self.numbers]).loss))
            found.append(float(gc.clip_grad_norm_(self.step, 0.5)))
            self.optimizer.step()
            self.optimizer.zero_grad()
        return found

    def values(self) -> dict[str, Tensor]:
        return whole(self.step)


def built(job: Job) -> dict[str, Any]:
    """First values, and the memory that they took."""
    objects = [id(p) for p in job.model.parameters()]
    with RealBytes() as counted:
        job.step.materialize(seed=SEED)
    assert objects == [id(p) for p in job.model.parameters()]
    modules = [sum(p.numel() * 8 for p in m.parameters(recurse=False)) for m in job.model.modules()]
    return {
        "peak": counted.peak,
        "owned": sum(local_bytes(p) for p in job.step.parameters()),
        "module": max(modules),
        "values": job.values(),
        "real": sum(local_bytes(p) for p in job.model.parameters() if not p.is_meta),
    }


def filled(job: Job, folder: Path) -> dict[str, bool | str]:
    """From one file of whole tensors, from a dict of them, and from a dict of parts."""
    state, other = build(BLOCKS).state_dict(), GPT(BLOCKS).double().state_dict()

    def equals(expected: dict[str, Tensor]) -> bool:
        return all(torch.equal(tensor, expected[name]) for name, tensor in job.values().items())

    gc.checkpoint.load_weights(job.step, folder / "weights.safetensors")
    found: dict[str, Any] = {"file": equals(state)}
    own = {name: tensor.clone() for name, tensor in job.step.state_dict().items()}
    job.step.load_state_dict(other)
    found["dict"] = equals(other)
    job.step.load_state_dict(own)
    found["parts"] = equals(state)
    name = "blocks.0.mlp.up.weight"
    mesh = own[name].device_mesh
    elsewhere = {**own, name: DTensor.from_local(state[name], mesh, [Replicate()] * mesh.ndim, run_check=False)}
    found["elsewhere"] = message(lambda: job.step.load_state_dict(elsewhere))
    return found


def everything(_: int, folder: str) -> dict[Any, Any]:
    job, place = Job("pp2 x tp2"), Path(folder)
    found: dict[Any, Any] = {"built": built(job)}
    job.train()
    gc.checkpoint.save(job.step, place / "saved", job.optimizer)
    found["unbroken"] = job.train(), job.values()
    found["again"] = gone_on(job, place / "saved")
    for layout in OTHERS:
        other = Job(layout, parameters="shard")
        if layout == "dp2 x tp2":
            found["filled"] = filled(other, place)
        found[layout] = gone_on(other, place / "saved")
        if layout == "dp2 x tp2":
            gc.checkpoint.save(other.step, place / "sharded", other.optimizer)
            found["sharded"] = other.train(), other.values()
    return found


def gone_on(job: Job, folder: Path) -> tuple[list[float], dict[str, Tensor]]:
    gc.checkpoint.load(job.step, folder, job.optimizer)
    return job.train(), job.values()


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    safetensors = pytest.importorskip("safetensors.torch")
    with tempfile.TemporaryDirectory() as name:
        safetensors.save_file(build(BLOCKS).state_dict(), Path(name, "weights.safetensors"))
        yield Path(name)


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[Any, Any]]:
    return run_ranks(everything, 4, str(folder), timeout=200)


@functools.cache
def alone() -> dict[str, Tensor]:
    """The first values in one process."""
    job = Job(None)
    job.step.materialize(seed=SEED)
    return job.values()


def test_first_values_are_those_of_one_process(ranks: list[dict[Any, Any]]) -> None:
    for rank in ranks:
        found = rank["built"]
        assert found["values"] and all(torch.equal(t, alone()[name]) for name, t in found["values"].items())
        assert found["real"] == found["owned"] <= found["peak"] <= found["owned"] + found["module"]
    assert set().union(*(rank["built"]["values"] for rank in ranks)) == set(alone())
    assert max(rank["built"]["owned"] for rank in ranks) < 0.45 * sum(local_bytes(t) for t in alone().values())


def test_weights_are_cut_up(ranks: list[dict[Any, Any]]) -> None:
    for rank in ranks:
        found = rank["filled"]
        assert (found["file"], found["dict"], found["parts"]) == (True, True, True)
        assert "of the state dict is laid out otherwise than the model's" in found["elsewhere"]


def test_it_goes_on_as_if_unbroken(ranks: list[dict[Any, Any]]) -> None:
    for rank in ranks:
        (losses, values), (again_losses, again_values) = rank["unbroken"], rank["again"]
        assert losses == again_losses
        assert all(torch.equal(again_values[name], tensor) for name, tensor in values.items())


@pytest.mark.parametrize("layout", OTHERS)
def test_it_goes_on_elsewhere(ranks: list[dict[Any, Any]], layout: str) -> None:
    for rank in ranks:
        compare(rank[layout], ranks, "unbroken")


@pytest.mark.parametrize(("name", "unbroken"), [("saved", "unbroken"), ("sharded", "sharded")])
def test_it_goes_on_in_one_process(ranks: list[dict[Any, Any]], name: str, unbroken: str, folder: Path) -> None:
    compare(gone_on(Job(None), folder / name), ranks, unbroken)


def compare(found: tuple[list[float], dict[str, Tensor]], ranks: list[dict[Any, Any]], unbroken: str) -> None:
    expected = {name: tensor for rank in ranks for name, tensor in rank[unbroken][1].items()}
    assert found[0] == pytest.approx(ranks[0][unbroken][0], rel=1e-9)
    assert found[1]
    for name, tensor in found[1].items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-6, atol=1e-9)
