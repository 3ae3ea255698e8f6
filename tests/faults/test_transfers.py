"""Plan(check="transfers"): a transfer that is not what it should be raises on all ranks, names its edge, and has no
effect.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import graphcomp as gc
from graphcomp.runtime.program.fingerprint import CheckedTransport
from graphcomp.runtime.program.transport import ProcessTransport
from tests.faults.model import ARMED, Chain, Trap, batches, loss_fn
from tests.faults.processes import run
from tests.faults.test_faults import same, seen, state

pytestmark = pytest.mark.gloo

DEADLINE = 30.0
Send = Callable[[Any, Any, Any, Sequence[Tensor]], Any]


def smaller(send: Send) -> Send:
    return lambda self, edge, microbatch, values: send(self, edge, microbatch, [values[0][:-1]])


def larger(send: Send) -> Send:
    return lambda self, edge, microbatch, values: send(self, edge, microbatch, [torch.cat([values[0]] * 50)])


def other_dtype(send: Send) -> Send:
    return lambda self, edge, microbatch, values: send(self, edge, microbatch, [values[0].view(torch.int32)])


def one_more(send: Send) -> Send:
    return lambda self, edge, microbatch, values: send(self, edge, microbatch, [*values, values[0]])


def flipped(send: Send) -> Send:
    """Below the fingerprint: as a network or a memory might do it."""

    def changed(self: Any, edge: Any, microbatch: Any, values: Sequence[Tensor]) -> Any:
        value = values[0].clone()
        value.view(torch.uint8).view(-1)[5] ^= 4
        return send(self, edge, microbatch, [value])

    return changed


def swapped(send: Send) -> Send:
    """Two microbatches change places."""
    held: list[Any] = []

    def later(self: Any, edge: Any, microbatch: Any, values: Sequence[Tensor]) -> Any:
        if microbatch == 0 and not held:
            held.append((edge, microbatch, values))
            return _Done()
        handle = send(self, edge, microbatch, values)
        if len(held) == 1:
            held.append(send(self, *held[0]))
        return handle

    return later


class _Done:
    def done(self) -> bool:
        return True

    def wait(self) -> None:
        return None


@contextmanager
def changed(owner: type, change: Callable[[Send], Send] | None) -> Iterator[None]:
    original = owner.send  # type: ignore[attr-defined]
    if change is not None:
        owner.send = change(original)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        owner.send = original  # type: ignore[attr-defined]


CASES: dict[str, tuple[type, Callable[[Send], Send], int, str, tuple[str, str]]] = {
    # what, below or above the fingerprint; on which rank; the edge that is named; what is expected, and what came
    "smaller": (CheckedTransport, smaller, 0, "edge 0>1 (from rank 0 to rank 1)", ("float32[3, 4]", "float32[2, 4]")),
    "larger": (CheckedTransport, larger, 2, "edge 2>1 (from rank 2 to rank 1)", ("float32[3, 4]", "float32[150, 4]")),
    "dtype": (CheckedTransport, other_dtype, 1, "edge 1>", ("float32[3, 4]", "int32[3, 4]")),
    "number": (CheckedTransport, one_more, 0, "edge 0>1", ("float32[3, 4]", "float32[3, 4], float32[3, 4]")),
    "order": (CheckedTransport, swapped, 0, "edge 0>1", ("step 2, edge 0>1, microbatch 0", "edge 0>1, microbatch 1")),
    "contents": (ProcessTransport, flipped, 2, "edge 2>1", ("float32[3, 4] with checksum", "checksum")),
}


def steps(rank: int) -> dict[str, Any]:
    def new_step(model: Chain, check: Any) -> Any:
        plan = gc.Plan(
            mesh=init_device_mesh("cpu", (3,), mesh_dim_names=("pp",)),
            split=["blocks.1", "blocks.2"],
            schedule="gpipe",
            backend="eager",
            check=check,
            deadline=DEADLINE,
            quiet=True,
        )
        return gc.compile_train_step(model, loss_fn, plan=plan)

    found: dict[str, Any] = {}
    for check in (None, "transfers"):
        model = Chain(3)
        step = new_step(model, check)
        for given in (batches(4), batches(2)):
            step(given)
        found[f"{check}"] = state(model), step.stats.messages, step.stats.bytes_sent
    before, given = state(model), batches()
    if rank == 1:
        given[2]["x"] = given[2]["x"] + 1
    try:
        step(given)
    except gc.errors.AgreementError as error:
        found["batch"] = seen(error) | {"changed": same(before, state(model))}
    found["usable"] = float(step(batches()).loss)
    for name, (owner, change, failing, *_) in CASES.items():
        model = Chain(3)
        step = new_step(model, "transfers")
        step(batches())
        before = state(model)
        ARMED.trap = Trap(when=time.monotonic())
        with changed(owner, change if rank == failing else None):
            try:
                step(batches())
            except Exception as error:
                found[name] = seen(error) | {"changed": same(before, state(model))}
    return found


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run(steps, 3)


def test_a_checked_step_is_the_same_step(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        (plain, *counted), (checked, *counted_too) = found["None"], found["transfers"]
        assert not same(plain, checked)
        assert counted == counted_too  # fingerprints are not among them


def test_other_contents_of_a_batch_are_noticed_before_anything_runs(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert found["batch"]["type"] == "AgreementError" and not found["batch"]["changed"]
        assert "microbatch 2: contents of x" in found["batch"]["text"]
        assert found["usable"] == ranks[0]["usable"]


@pytest.mark.parametrize("name", CASES)
def test_a_wrong_transfer_raises_on_all_ranks(ranks: list[dict[str, Any]], name: str) -> None:
    _, _, failing, edge, (expected, got) = CASES[name]
    receivers = [rank for rank, found in enumerate(ranks) if found[name]["type"] == "AgreementError"]
    assert len(receivers) == 1 and receivers[0] != failing
    for found in ranks:
        one = found[name]
        assert one["type"] in ("AgreementError", "RankFailure")
        assert edge in one["text"]
        assert expected in one["text"] and got in one["text"], one["text"]
        assert not one["changed"]
        assert one["raised"] - one["trap"] < DEADLINE
