"""A failure on one rank is a clear error on all of them, at once, and leaves everything as it was."""

from __future__ import annotations

import re
import time
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import graphcomp as gc
from graphcomp.runtime.program import transport
from graphcomp.runtime.program.transport import MOST_BYTES
from graphcomp.testing import run_virtual
from tests.faults.model import ARMED, WIDTH, Chain, Trap, batches, loss_fn
from tests.faults.processes import run
from tests.faults.rows import ROWS, Row
from tests.sharing import shared_captures

pytestmark = pytest.mark.gloo


def state(model: nn.Module) -> dict[str, Tensor | None]:
    """All that a step could change: this rank's part of it, copied."""
    found: dict[str, Tensor | None] = dict(model.named_buffers())
    for name, parameter in model.named_parameters():
        found |= {name: parameter, f"gradient of {name}": parameter.grad}
    return {
        key: value if value is None else (value.to_local() if isinstance(value, DTensor) else value).detach().clone()
        for key, value in found.items()
    }


def same(one: dict[str, Tensor | None], two: dict[str, Tensor | None]) -> list[str]:
    """The names of what differs, in a bit or in form."""
    return [
        key
        for key, value in one.items()
        if (value is None) != (two[key] is None) or (value is not None and not torch.equal(value, two[key]))
    ]


def seen(error: BaseException) -> dict[str, Any]:
    return {
        "type": type(error).__name__,
        "text": "\n".join([str(error), *getattr(error, "__notes__", [])]),
        "raised": time.monotonic(),
        "trap": ARMED.trap.when,
    }


def new_step(row: Row, model: nn.Module) -> Any:
    """On new groups: also after an earlier row, in which all groups of the processes were closed."""
    shape, names = ((row.pp, row.dp), ("pp", "dp")) if row.dp > 1 else ((row.pp,), ("pp",))
    plan = gc.Plan(
        mesh=init_device_mesh("cpu", shape, mesh_dim_names=names),
        split=[f"blocks.{stage}" for stage in range(1, row.pp)],
        parameters="shard" if row.shard else "replicate",
        backend="eager",
        deadline=4.0 if row.what == "stall" else 30.0,
        quiet=True,
    )
    return gc.compile_train_step(model, loss_fn, plan=plan)


def run_row(rank: int, row: Row) -> dict[str, Any]:
    """One rank: a good step perhaps, and the one that fails; then another, of the same step object."""
    transport.MOST_BYTES = MOST_BYTES if row.later else 0  # over channels, and over process groups
    model = Chain(row.pp, counted=row.dp == 1)
    step, given, found = new_step(row, model), batches(), {}
    if row.later:
        found["good"] = float(step(batches()).loss)
    if row.place == "trace" and row.later:
        given = batches(scale=2.0)
    fails = rank == row.rank
    ARMED.trap = Trap()
    if fails and row.what == "gradient":
        for parameter in model.parameters():
            parameter.grad = torch.zeros(1).expand(parameter.shape)
    elif fails and row.what == "other batch":
        given = batches(rows=2)
    elif fails:
        ARMED.trap = Trap(row.place, row.number, row.what)
    before = state(model)
    try:
        step(given)
    except BaseException as error:
        found |= seen(error)
    found["changed"] = same(before, state(model))
    ARMED.trap = Trap()
    model.zero_grad()
    try:
        found["good"] = float(step(batches()).loss)
        found["unusable"] = ""
    except gc.errors.StepError as error:
        found["unusable"] = str(error)
    return found


def run_rows(rank: int, rows: list[Row]) -> list[dict[str, Any]]:
    """All in the same processes, and a good step at the end."""
    ARMED.install()
    found = []
    for row in rows:
        with nullcontext() if row.place == "trace" else shared_captures():  # what is captured already is not traced
            found.append(run_row(rank, row))
    if rows[-1].what != "kill":
        found.append({"good": float(new_step(rows[-1], Chain(rows[-1].pp, rows[-1].dp == 1))(batches()).loss)})
    return found


def expected_loss(pp: int, data_ranks: int) -> float:
    plan = gc.Plan(stages=pp, split=[f"blocks.{i}" for i in range(1, pp)], backend="eager", quiet=True)
    given: Any = [batches()] * data_ranks if data_ranks > 1 else batches()
    result, _ = run_virtual(Chain(pp, data_ranks == 1), loss_fn, given, plan=plan, data_ranks=data_ranks)
    return float(result.loss)


GROUPS = [
    [row for row in ROWS if (row.pp, row.dp) == layout and row.what != "kill"]
    for layout in dict.fromkeys((row.pp, row.dp) for row in ROWS)
] + [[row] for row in ROWS if row.what == "kill"]


@pytest.mark.parametrize("rows", GROUPS, ids=lambda rows: f"{rows[0].pp}x{rows[0].dp} {rows[0].what}")
def test_rows(rows: list[Row]) -> None:
    pp, dp = rows[0].pp, rows[0].dp
    ranks = run(run_rows, pp * dp, rows, timeout=240)
    loss, wrong = expected_loss(pp, dp), []
    for number, row in enumerate(rows):
        found = {rank: one[number] for rank, one in enumerate(ranks) if isinstance(one, list)}
        try:
            check_row(row, found, loss)
        except AssertionError as error:
            wrong.append(f"{row}: {error}")
    assert not wrong, "\n\n".join(wrong)
    if rows[-1].what == "kill":
        assert ranks[rows[-1].rank] == -9
    else:
        assert [one[-1]["good"] for one in ranks] == pytest.approx([loss] * len(ranks), rel=1e-6)


def check_row(row: Row, living: dict[int, dict[str, Any]], loss: float) -> None:
    assert len(living) == row.pp * row.dp - (row.what == "kill")
    for rank, found in living.items():
        assert "type" in found, f"rank {rank} did not raise"
        assert not found["changed"], f"rank {rank}"
        CHECKS.get(row.what, raised)(row, rank, found)
        usable = (row.place or row.what) in ("trace", "other batch") and row.what != "interrupt"
        assert (found["unusable"] == "") == usable, found["unusable"]
        if "good" in found:
            assert found["good"] == pytest.approx(loss, rel=1e-6)
    times = [found["raised"] for found in living.values()]
    begun = max(found["trap"] for found in living.values()) or min(times)
    assert max(times) - begun < 30


def raised(row: Row, rank: int, found: dict[str, Any]) -> None:
    """The error keeps its type where it happened; every rank names rank, stage, microbatch, action, and it."""
    text, traced = found["text"], row.place == "trace" and row.what == "raise"
    assert found["type"] == (row.error if rank == row.rank else "RankFailure"), text
    if traced:
        assert row.where in text and f"at {row.place}" in text
        assert rank == row.rank or f"rank {row.rank}, stage {row.stage}" in text
        return
    assert row.text in text and (row.what != "raise" or f"at {row.place}" in text), text
    assert ("as before the call on this rank" if row.place == "close" else "as before the call, on all ranks") in text
    assert rank == row.rank or f"{row.error}" in text
    assert "an earlier one failed while messages were under way" in found["unusable"]
    assert row.error in found["unusable"] and row.text in found["unusable"], found["unusable"]


def killed(row: Row, rank: int, found: dict[str, Any]) -> None:
    assert found["type"] == "RankFailure"
    assert f"the connection to rank {row.rank} broke, and nothing was heard of it since" in found["text"]
    assert re.search("Connection (closed|reset) by peer", found["text"])


def stalled(row: Row, rank: int, found: dict[str, Any]) -> None:
    assert found["type"] == "RankFailure"
    assert "waited for another rank until the deadline" in found["text"]
    assert "Timed out waiting 4000ms" in found["text"]
    assert rank == row.rank or f"nothing was heard of rank {row.rank}" in found["text"]


def disagreed(row: Row, rank: int, found: dict[str, Any]) -> None:
    assert found["type"] == "AgreementError"
    for rows in (2, 3):
        assert f"microbatch 0: x f32[{rows}, {WIDTH}], tokens f32[{rows}]" in found["text"]


CHECKS = {"kill": killed, "stall": stalled, "other batch": disagreed}
