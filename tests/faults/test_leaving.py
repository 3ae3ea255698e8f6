"""Ranks that leave: between steps, all at once, within the closing exchange, while the model itself communicates."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import graphcomp as gc
import graphcomp.prepare
from graphcomp.collectives import all_reduce
from graphcomp.runtime.program import transport
from tests.faults.model import ARMED, WIDTH, Chain, Trap, batches, loss_fn, passing
from tests.faults.processes import run, say_ready
from tests.faults.test_faults import same, seen, state

pytestmark = pytest.mark.gloo

DEADLINE = 60.0
"""Seconds after which ranks would raise that nobody frees."""


def pipeline(stages: int) -> tuple[Chain, Any]:
    model = Chain(stages)
    mesh = init_device_mesh("cpu", (stages,), mesh_dim_names=("pp",))
    split = [f"blocks.{stage}" for stage in range(1, stages)]
    plan = gc.Plan(mesh=mesh, split=split, backend="eager", deadline=DEADLINE, quiet=True)
    return model, gc.compile_train_step(model, loss_fn, plan=plan)


def attempt(call: Any, *given: Any, model: nn.Module) -> dict[str, Any]:
    """What it raises, and what has changed then."""
    before, begun = state(model), time.monotonic()
    try:
        call(*given)
    except BaseException as error:
        return seen(error) | {"changed": same(before, state(model)), "begun": begun}
    return {"type": None, "changed": same(before, state(model))}


def interrupted(rank: int) -> dict[str, Any]:
    """Rank 1 does not come; the others wait for it, in code that no signal interrupts."""
    transport.MOST_BYTES = 0
    model, step = pipeline(3)
    step(batches())
    ARMED.trap = Trap("F1", 2, "stall") if rank == 1 else Trap()
    say_ready()
    return attempt(step, batches(), model=model)


def test_ctrl_c_on_all_ranks() -> None:
    for rank, found in enumerate(run(interrupted, 3, signals=True)):
        assert found["type"] == "KeyboardInterrupt", (rank, found)
        assert found["raised"] - found["begun"] < DEADLINE and not found["changed"]


def ends(rank: int, how: str) -> list[dict[str, Any]]:
    """Between two steps rank 1 raises in user code and ends, or leaves the loop and ends; the others go on."""
    model, step = pipeline(3)
    step(batches())
    if rank == 1:
        if how == "raises":
            os._exit(1)  # an error that nobody catches, as far as others can see
        return []
    first = attempt(step if how == "raises" else gc.clip_grad_norm_, *_arguments(step, how), model=model)
    return [first, attempt(step, batches(), model=model)]


def _arguments(step: Any, how: str) -> tuple[Any, ...]:
    return (batches(),) if how == "raises" else (step, 1.0)


@pytest.mark.parametrize("how", ["raises", "returns"])
def test_a_rank_that_ends_between_steps(how: str) -> None:
    ranks = run(ends, 3, how)
    assert ranks[1] == (1 if how == "raises" else [])
    for rank in (0, 2):
        first, second = ranks[rank]
        assert first["type"] == "RankFailure" and not first["changed"]
        assert "the connection to rank 1 broke, and nothing was heard of it since" in first["text"]
        assert ("preparing the step" if how == "raises" else "clipping gradients") in first["text"]
        assert first["raised"] - first["begun"] < DEADLINE
        assert second["type"] == "StepError"


def within_closing(rank: int) -> list[dict[str, Any]]:
    """Rank 3 comes through the pipeline's exchange, and not to that of its data ranks."""
    ARMED.install()
    model = Chain(2, counted=False)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    plan = gc.Plan(mesh=mesh, split=["blocks.1"], backend="eager", deadline=DEADLINE, quiet=True)
    step = gc.compile_train_step(model, loss_fn, plan=plan)
    ARMED.trap = Trap("close", 2) if rank == 3 else Trap()
    return [attempt(step, batches(), model=model), attempt(step, batches(), model=model)]


def test_a_rank_that_fails_within_the_closing_exchange() -> None:
    """The other stage's ranks have completed the step by then; all say so. Only an error of ours, or the end of a
    process, can come there.
    """
    ranks = run(within_closing, 4)
    for rank, (first, second) in enumerate(ranks):
        if rank in (0, 1):
            assert first["type"] is None and first["changed"]
            assert "Rank 3 did not complete the call before, which is complete on this rank" in second["text"]
            assert not second["changed"]
        else:
            assert first["type"] == ("Injected" if rank == 3 else "RankFailure") and not first["changed"]
            assert "as before the call on this rank" in first["text"] and "has completed the step" in first["text"]
            assert second["type"] == "StepError"


def interrupted_while_closing(rank: int) -> list[dict[str, Any]]:
    ARMED.install()
    model, step = pipeline(3)
    ARMED.trap = Trap("close", 1, "signal") if rank == 1 else Trap()
    return [attempt(step, batches(), model=model), attempt(step, batches(), model=model)]


def test_ctrl_c_in_the_closing_exchange_comes_when_the_step_is_complete() -> None:
    for rank, (first, second) in enumerate(run(interrupted_while_closing, 3)):
        assert first["type"] == ("KeyboardInterrupt" if rank == 1 else None) and first["changed"]
        assert second["type"] == ("StepError" if rank == 1 else "RankFailure") and not second["changed"]
        if rank == 1:
            assert "The step is complete on this rank, with all that it writes" in first["text"]
        else:
            assert "The call before is complete on all ranks" in second["text"]


class Talks(nn.Module):
    """Its data ranks add up what they have, in the middle of forward."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.mesh, self.one, self.two = mesh, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(all_reduce(passing(self.one(x), "F0"), self.mesh))


def talking(rank: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("dp",))
    model = Talks(mesh)
    step = gc.compile_train_step(
        model, loss_fn, plan=gc.Plan(mesh=mesh, backend="eager", deadline=DEADLINE, quiet=True)
    )
    step(batches())
    ARMED.trap = Trap("F0", 2) if rank == 1 else Trap()
    return attempt(step, batches(), model=model)


def test_ranks_that_wait_in_a_collective_of_the_model_are_freed() -> None:
    for rank, found in enumerate(run(talking, 3)):
        assert found["type"] == ("Injected" if rank == 1 else "RankFailure") and not found["changed"]
        assert "rank 1, stage 0, microbatch 1, action 0FB1" in found["text"]
        assert found["raised"] - found["begun"] < DEADLINE


def while_spreading(rank: int) -> list[dict[str, Any]]:
    """Rank 3 does not take part when its data ranks split their parameters, over the mesh's own group."""
    found = []
    spread = graphcomp.prepare.shard_parameters
    for failing in (3, None):
        model = Chain(2, counted=False)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
        plan = gc.Plan(
            mesh=mesh, split=["blocks.1"], parameters="shard", backend="eager", deadline=DEADLINE, quiet=True
        )
        step = gc.compile_train_step(model, loss_fn, plan=plan)
        graphcomp.prepare.shard_parameters = interrupt if rank == failing else spread
        found.append(attempt(step, batches(), model=model))
    return found


def interrupt(*given: Any) -> None:
    raise KeyboardInterrupt


def test_ranks_that_wait_for_parameters_are_freed() -> None:
    for rank, (failed, after) in enumerate(run(while_spreading, 4)):
        assert failed["type"] == ("KeyboardInterrupt" if rank == 3 else "RankFailure")
        assert "rank 3, stage 1, preparing the step" in failed["text"]
        assert failed["raised"] - failed["begun"] < DEADLINE
        assert after["type"] is None


def other_calls(rank: int) -> list[dict[str, Any]]:
    """A failure while evaluating, and one while counting."""
    found = []
    for name, place in (("evaluate", "F1"), ("count", "count")):
        model, step = pipeline(2)
        step(batches())
        ARMED.trap = Trap(place, 2) if rank == 1 else Trap()
        found.append(attempt(getattr(step, name), batches(), model=model))
        found.append(attempt(step, batches(), model=model))
    return found


def test_other_calls() -> None:
    """Rank 0 has nothing to count for the others, and hears of it in its next call."""
    (evaluating, after, counting, then), (raised, unusable, too, again) = run(other_calls, 2)
    assert (evaluating["type"], after["type"]) == ("RankFailure", "StepError")
    assert (counting["type"], then["type"]) == (None, "RankFailure")
    assert (raised["type"], unusable["type"], too["type"], again["type"]) == ("Injected", "StepError") * 2
    assert all("rank 1, stage 1, microbatch 1, action 1F1" in one["text"] for one in (evaluating, raised))
    assert all("rank 1, stage 1, counting tokens, microbatch 1" in one["text"] for one in (then, too))
    assert not any(one["changed"] for one in (evaluating, counting, then, raised, too))


SCRIPT = """
import os, signal, sys
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
import graphcomp as gc
from tests.faults.model import ARMED, Chain, Trap, batches, loss_fn

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("pp",))
plan = gc.Plan(mesh=mesh, split=["blocks.1", "blocks.2"], backend="eager", quiet=True)
model = Chain(3)
step = gc.compile_train_step(model, loss_fn, plan=plan)
step(batches())
if dist.get_rank() == int(sys.argv[1]):
    ARMED.trap = Trap(sys.argv[2], 2, sys.argv[3])
step(batches())
print("not reached")
"""


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@pytest.mark.parametrize(("failing", "place", "what"), [(1, "F1", "raise"), (0, "B0", "kill")])
def test_a_script_ends_on_all_ranks(failing: int, place: str, what: str) -> None:
    """As users start it: a store over TCP, held by rank 0, errors that nobody catches, and Python's own way out."""
    common = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "3"}
    common |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", SCRIPT, str(failing), place, what]
    processes = [
        subprocess.Popen(command, env=common | {"RANK": str(rank)}, stderr=subprocess.PIPE, text=True)
        for rank in range(3)
    ]
    try:
        errors = [process.communicate(timeout=120)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    codes = [-signal.SIGKILL if what == "kill" and rank == failing else 1 for rank in range(3)]
    assert [process.returncode for process in processes] == codes, errors
    for rank, error in enumerate(errors):
        if what == "raise":
            assert "rank 1, stage 1, microbatch 1, action 1F1" in error and "Injected: at F1" in error
            assert ("RankFailure: rank 1 failed" in error) == (rank != failing)
        elif rank != failing:
            assert "RankFailure: the connection to another rank broke, and the job's store cannot be reached" in error
