"""check_finite: the first stage and microbatch, in the order in which data flows, and nothing written."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphcomp as gc
from graphcomp.errors import NonFiniteError, PlanError, StepError
from graphcomp.testing import HostSyncs, VirtualStep


class Chain(nn.Module):
    """Four layers, the second of which goes through a square root, whose gradient at zero is infinite."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(x)
            if number == 1:
                x = (x * 0).sqrt() * x if x.shape[0] == 7 else x.square()
        return x


def loss_fn(output: Tensor, batch: tuple[Tensor, Tensor]) -> Any:
    return gc.TokenLoss((output - batch[1]).square().sum(), batch[1].shape[0])


def batch(rows: int = 3, value: float = 1.0, goal: float = 0.0) -> tuple[Tensor, Tensor]:
    return torch.full((rows, 4), value), torch.full((rows, 4), goal)


GOOD = batch()
PLAN = gc.Plan(stages=4, backend="eager", quiet=True, check_finite=True, split=["layers.1", "layers.2", "layers.3"])
CASES = [
    # what comes in, and where it is first seen
    ([GOOD, batch(value=torch.nan), batch(value=torch.inf)], "stage 0 of data rank 0, microbatch 1, forward", "0>1"),
    ([GOOD, GOOD, batch(goal=torch.inf)], "stage 3 of data rank 0, microbatch 2, forward", "loss loss"),
    ([GOOD, batch(rows=7)], "stage 1 of data rank 0, microbatch 1, backward", "layers.1"),
]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("batches", "where", "what"), CASES)
def test_the_first_place_is_named(batches: list[Any], where: str, what: str, schedule: str) -> None:
    torch.manual_seed(0)
    step = VirtualStep(Chain(), loss_fn, plan=replace(PLAN, schedule=schedule))
    step.run([GOOD])
    with pytest.raises(NonFiniteError) as raised:
        step.run(batches)
    assert raised.value.where == where and what in str(raised.value.got)
    assert "step 1 yields a value that is not finite" in str(raised.value)
    step.run([GOOD])


def test_data_ranks_find_the_first_of_all() -> None:
    torch.manual_seed(0)
    step = VirtualStep(Chain(), loss_fn, plan=PLAN, data_ranks=2)
    with pytest.raises(NonFiniteError) as raised:
        step.run([[GOOD, batch(value=torch.nan)], [batch(goal=torch.nan)]])
    assert raised.value.where == "stage 3 of data rank 1, microbatch 0, forward"


def test_a_step_can_be_skipped_and_costs_one_read() -> None:
    torch.manual_seed(0)
    model = Chain()
    step = gc.compile_train_step(model, loss_fn, plan=gc.Plan(backend="eager", quiet=True, check_finite=True))
    step([GOOD])
    before = [p.grad.clone() for p in model.parameters()]
    with pytest.raises(StepError):
        step([batch(value=torch.nan)])
    assert all(torch.equal(a, p.grad) for a, p in zip(before, model.parameters(), strict=True))
    step([GOOD])
    assert step.stats.steps == 2
    assert all(torch.equal(2 * a, p.grad) for a, p in zip(before, model.parameters(), strict=True))
    model.zero_grad()
    unchecked = gc.compile_train_step(model, loss_fn, plan=gc.Plan(backend="eager", quiet=True))
    unchecked([batch(value=torch.nan)])
    with HostSyncs() as syncs:
        unchecked([GOOD])
    assert not syncs.found
    assert model.layers[0].weight.grad.isnan().all()


class Phase(nn.Module):
    """A complex parameter, whose gradient is not finite where x is 0, though the loss is."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.zeros(4, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.turn.real.sqrt()


def test_complex_gradients_are_looked_at() -> None:
    step = gc.compile_train_step(Phase(), loss_fn, plan=gc.Plan(backend="eager", quiet=True, check_finite=True))
    with pytest.raises(NonFiniteError, match="nan or infinity in 'grad turn'"):
        step([batch(goal=1.0)])


def test_the_option_is_a_flag() -> None:
    with pytest.raises(PlanError, match="unknown check_finite: 'loss'"):
        gc.Plan(check_finite="loss")
