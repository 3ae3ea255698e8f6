"""Models that communicate, in steps on real ranks: the global function's gradients; what cannot meet is refused."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import graphcomp as gc
from graphcomp.errors import AgreementError, CaptureError
from graphcomp.testing import run_ranks

ROWS = (3, 5)  # of the microbatches; more than one, and different


class Centred(nn.Module):
    """Takes off the mean over the rows of all ranks of a group: each rank's loss depends on all ranks' inputs."""

    def __init__(self, group: Any, extra: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 4)
        self.third, self.last = nn.Linear(4, 8), nn.Linear(8, 1)
        self.group, self.extra = group, extra

    def mean(self, x: Tensor) -> Tensor:
        return gc.collectives.all_reduce(x.mean(0), self.group, "avg") if self.group is not None else x.mean((0, 1))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).tanh()
        h = self.second(h - self.mean(h)).tanh()
        if self.extra is not None:
            h = self.extra(h)
        h = self.third(h - self.mean(h)).tanh()
        return self.last(h)


def squares(output: Tensor, batch: Any) -> gc.TokenLoss:
    """A sum over rows and how many there are."""
    return gc.TokenLoss((output - batch["y"]).square().sum(), torch.ones_like(batch["y"]).sum())


def batch_of(data_rank: int, number: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(10 * data_rank + number)
    rows = ROWS[number]
    x = torch.randn(rows, 4, generator=generator, dtype=torch.float64)
    return {"x": x, "y": torch.randn(rows, 1, generator=generator, dtype=torch.float64)}


def build(group: Any, extra: Callable[[Tensor], Tensor] | None = None) -> Centred:
    torch.manual_seed(0)
    return Centred(group, extra).double()


def unused(group: Any) -> Callable[[Tensor], Tensor]:
    def extra(h: Tensor) -> Tensor:
        gc.collectives.all_reduce(h.detach().sum(), group)
        return h

    return extra


def reference(ranks: int) -> tuple[float, dict[str, Tensor]]:
    """One process: microbatch i of all ranks together, the mean taken over all of their rows."""
    model = build(None)
    total, count = torch.zeros((), dtype=torch.float64), 0
    for number in range(len(ROWS)):
        batches = [batch_of(rank, number) for rank in range(ranks)]
        output = model(torch.stack([batch["x"] for batch in batches]))
        total = total + (output - torch.stack([batch["y"] for batch in batches])).square().sum()
        count += ranks * ROWS[number]
    (total / count).backward()
    return (total / count).item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def compare(found: list[dict[str, Any]], ranks: int, tolerance: float = 1e-9) -> None:
    loss, gradients = reference(ranks)
    seen = set()
    for one in found:
        assert one["loss"] == pytest.approx(loss, abs=tolerance)
        for name, gradient in one["gradients"].items():
            torch.testing.assert_close(gradient, gradients[name], rtol=tolerance, atol=tolerance)
            seen.add(name)
    assert seen == set(gradients)


def run_step(model: nn.Module, plan: gc.Plan, batches: list[Any]) -> dict[str, Any]:
    step = gc.compile_train_step(model, squares, plan=plan)
    for _ in range(2):
        model.zero_grad()
        result = step(batches)
    gradients = {name: p.grad.clone() for name, p in step.named_parameters() if p.grad is not None}
    return {"loss": result.loss.item(), "gradients": gradients, "traces": step.stats.traces}


def over_data_ranks(rank: int, backend: Any) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    model = build(mesh["dp"], unused(mesh["dp"]))
    plan = gc.Plan(mesh=mesh, backend=backend, quiet=True, deadline=60.0)
    return run_step(model, plan, [batch_of(mesh.get_local_rank("dp"), number) for number in range(len(ROWS))])


@pytest.mark.gloo
def test_a_model_that_communicates_over_data_ranks_is_cut() -> None:
    found = run_ranks(over_data_ranks, 4, "eager")
    compare(found, 2)
    assert {one["traces"] for one in found} == {1}


@pytest.mark.gloo
@pytest.mark.inductor
def test_compiled() -> None:
    compare(run_ranks(over_data_ranks, 4, "inductor"), 2)


def alone(rank: int) -> dict[str, Any]:
    """No mesh: the group is the model's own business. Adds up to the global gradient over the ranks."""
    model = build(dist.group.WORLD)
    found = run_step(
        model, gc.Plan(backend="eager", quiet=True), [batch_of(rank, number) for number in range(len(ROWS))]
    )
    for gradient in found["gradients"].values():
        dist.all_reduce(gradient, op=dist.ReduceOp.SUM)
    total = torch.tensor(found["loss"], dtype=torch.float64)
    dist.all_reduce(total)
    return {**found, "loss": total.item() / 2, "gradients": {n: g / 2 for n, g in found["gradients"].items()}}


@pytest.mark.gloo
def test_a_model_may_communicate_without_a_mesh() -> None:
    compare(run_ranks(alone, 2), 2)


def rows_reduced(op: str) -> Callable[[Any], Callable[[Tensor], Tensor]]:
    return lambda group: lambda h: h + gc.collectives.all_reduce(h.detach(), group, op)


def rows_gathered(group: Any) -> Callable[[Tensor], Tensor]:
    """Every rank has to give as many rows."""
    return lambda h: h + gc.collectives.all_gather(h.detach(), group).mean()


DEADLINE = 60.0


def different(rank: int) -> list[tuple[str, str, float]]:
    """What each rank hears, and after how many seconds, where the ranks would not communicate alike."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    plan = gc.Plan(mesh=mesh, backend="eager", quiet=True, deadline=DEADLINE)
    group = mesh["dp"]
    batches = [batch_of(rank, number) for number in range(len(ROWS))]
    cases: list[tuple[nn.Module, list[Any]]] = [
        (build(group, unused(group) if rank else None), batches),
        (build(group, rows_reduced("max" if rank else "min")(group)), batches),
        (build(group), batches if rank else batches[:1]),
        (build(group, rows_gathered(group)), [batch_of(rank, 0), batch_of(rank, 0 if rank else 1)]),
    ]
    heard = []
    for model, given in cases:
        begin = time.perf_counter()
        with pytest.raises(AgreementError) as caught:
            gc.compile_train_step(model, squares, plan=plan)(given)
        heard.append((str(caught.value.expected), str(caught.value.got), time.perf_counter() - begin))
    return heard


@pytest.mark.gloo
def test_ranks_that_would_not_meet_say_so() -> None:
    """The first difference, on both ranks, before the deadline: each shows its own side first."""
    expected = [
        ("mean.dim(%", "sum(%"),
        ("'min', dp)", "'max', dp)"),
        ("nothing more", "all_reduce over dp"),
        ("microbatch 1: a collective of", "microbatch 1: a collective of"),
    ]
    first, other = run_ranks(different, 2)
    for (mine, theirs, one), (yours, ours, two), texts in zip(first, other, expected, strict=True):
        assert (mine, theirs) == (ours, yours)
        assert texts[0] in mine and "(rank 0)" in mine
        assert texts[1] in theirs and "(rank 1)" in theirs
        assert max(one, two) < DEADLINE


def between_stages(rank: int) -> str:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    step = gc.compile_train_step(build(mesh["pp"]), squares, plan=gc.Plan(mesh=mesh, backend="eager", quiet=True))
    with pytest.raises(CaptureError) as caught:
        step([batch_of(0, 0)])
    return caught.value.what


@pytest.mark.gloo
def test_stages_do_not_meet() -> None:
    assert set(run_ranks(between_stages, 2)) == {
        "a collective of the model runs over ranks of different pipeline stages, which never meet in it"
    }
