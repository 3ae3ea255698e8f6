"""A step that is closed gives back what it has made to talk to other ranks, and nothing that is the user's."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import graphcomp as gc
from graphcomp.errors import StepError
from graphcomp.testing import run_ranks

OTHER_CALLS: dict[str, Callable[[Any, Any, Path], Any]] = {
    "a step": lambda step, batches, folder: step(batches),
    "hold": lambda step, batches, folder: step.hold(batches),
    "evaluate": lambda step, batches, folder: step.evaluate(batches),
    "count": lambda step, batches, folder: step.count(batches),
    "compile": lambda step, batches, folder: step.compile(batches[0]),
    "materialize": lambda step, batches, folder: step.materialize(),
    "explain": lambda step, batches, folder: step.explain(),
    "save programs": lambda step, batches, folder: step.save(folder),
    "load_state_dict": lambda step, batches, folder: step.load_state_dict(step.state_dict()),
    "save": lambda step, batches, folder: gc.checkpoint.save(step, folder / "c"),
    "save_async": lambda step, batches, folder: gc.checkpoint.save_async(step, folder / "c"),
    "load": lambda step, batches, folder: gc.checkpoint.load(step, folder / "c"),
    "clip_grad_norm_": lambda step, batches, folder: gc.clip_grad_norm_(step, 1.0),
}


def compiled(**changes: Any) -> tuple[Any, list[torch.Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()
    plan = gc.Plan(backend="eager", quiet=True, **changes)
    step = gc.compile_train_step(model, lambda output, batch: gc.mean_loss(output.square().sum()), plan=plan)
    return step, [torch.ones(rows, 4, dtype=torch.float64) for rows in (2, 3)]


def test_a_closed_step_says_so_whatever_it_is_asked(tmp_path: Path) -> None:
    step, batches = compiled()
    held = step.hold(batches)
    step.close()
    step.close()
    for name, call in OTHER_CALLS.items():
        with pytest.raises(StepError, match="this step was closed"):
            call(step, batches, tmp_path)
            pytest.fail(name)
    assert not list(tmp_path.iterdir())
    held.deposit()
    assert all(one.grad is not None for one in step.parameters())
    torch.optim.AdamW(step.parameters()).step()
    assert step.state_dict().keys() == step.model.state_dict().keys()


def held_by_this_process() -> tuple[int, int]:
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def opened_and_closed(rank: int, folder: str) -> tuple[list[tuple[int, int]], list[float]]:
    """Descriptors and threads, after the first and after six more; then the losses of steps that share a mesh."""
    pipeline = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    data = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    used = []
    for number in range(7):
        step, batches = compiled(mesh=pipeline, stages=2, deadline=30.0)
        step(batches)
        if number == 0:
            saved = gc.checkpoint.save_async(step, folder)
        step.close()
        if number == 0:
            assert saved.done()
        used.append(held_by_this_process())
    return [used[0], used[-1]], sharded_on(data)


def sharded_on(mesh: DeviceMesh) -> list[float]:
    """A step goes on with the parameters and the optimizer of one that was closed."""
    step, batches = compiled(mesh=mesh, parameters="shard", deadline=30.0)
    losses = [float(step(batches).loss)]
    optimizer = torch.optim.SGD(step.parameters(), lr=0.01)
    step.close()
    assert all(isinstance(one.grad, DTensor) for one in step.model.parameters())
    optimizer.step()
    optimizer.zero_grad()
    plan = gc.Plan(mesh=mesh, parameters="shard", backend="eager", quiet=True, deadline=30.0)
    step = gc.compile_train_step(step.model, step.compiler.loss_fn, plan=plan)
    losses.append(float(step(batches).loss))
    dist.destroy_process_group()
    step.close()
    return losses


@pytest.mark.gloo
def test_what_was_opened_is_closed(tmp_path: Path) -> None:
    """And the loss of the second step is what eager PyTorch has after the same update."""
    step, batches = compiled()
    model, expected = step.model, []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(2):
        optimizer.zero_grad()
        loss = sum((model(one).square().sum() for one in batches), torch.zeros(())) / 2
        expected.append(float(loss.detach()))
        loss.backward()
        optimizer.step()
    for (first, last), losses in run_ranks(opened_and_closed, 2, str(tmp_path / "checkpoint")):
        assert last == first
        assert losses == pytest.approx(expected, rel=1e-12)
