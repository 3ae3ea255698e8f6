"""Evaluation disturbs nothing, compiles once, and is followed by, and follows, what changes between steps."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import graphcomp as gc
from graphcomp.testing import VirtualStep
from tests.zoo import ZOO

EAGER = gc.Plan(backend="eager", quiet=True)


class Noisy(nn.Module):
    """Draws in eval mode too, and keeps a running mean in train mode."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.head = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.layer(x + 0.1 * torch.randn_like(x)))
        return self.head(nn.functional.dropout(h, 0.2, self.training))


def squared(output: Tensor, batch: Tensor) -> Any:
    return gc.TokenLoss(output.square().sum(), batch.shape[0])


def trained(stages: int, evaluates: bool) -> tuple[list[float], dict[str, Tensor]]:
    torch.manual_seed(1)
    model = Noisy()
    step = VirtualStep(model, squared, plan=gc.Plan(stages=stages, backend="eager", quiet=True))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    losses = []
    for number in range(4):
        batches = [torch.randn(rows, 3, generator=torch.Generator().manual_seed(number)) for rows in (4, 6)]
        ran = step.run(batches)
        losses.append(ran.result.loss.item())
        for name, parameter in model.named_parameters():
            parameter.grad = ran.gradients[name]
        optimizer.step()
        if evaluates:  # a tail, and other sizes
            state = torch.get_rng_state()
            for part in ([batches[0], batches[1], batches[0]], [batches[1][:3]]):
                step.evaluate(part)
            assert torch.equal(state, torch.get_rng_state()) and model.training
            assert step.compiler.traces == 2
    return losses, {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("stages", [1, 2])
def test_interleaved_it_changes_no_later_bit(stages: int) -> None:
    losses, state = trained(stages, False)
    again, other = trained(stages, True)
    assert losses == again
    assert all(torch.equal(value, other[name]) for name, value in state.items())


def test_at_two_stages_and_two_data_ranks_it_is_the_same_average() -> None:
    case = ZOO["gpt"]
    model = case.build()
    alone = gc.compile_train_step(model, case.loss_fn, plan=EAGER)
    step = VirtualStep(model, case.loss_fn, plan=gc.Plan(stages=2, backend="eager", quiet=True), data_ranks=2)
    batches = case.microbatches(7)
    expected = alone.evaluate(batches)
    # The last call has one microbatch for the first data rank and an empty one for the second.
    empty = {name: leaf[:0] for name, leaf in batches[0].items()}
    calls = [[batches[0:2], batches[2:4]], [batches[4:5], batches[5:6]], [batches[6:], [empty]]]
    found = gc.combine(step.evaluate(lines) for lines in calls)
    assert found.loss.item() == pytest.approx(expected.loss.item(), rel=1e-6)
    assert int(found.tokens["loss"]) == int(expected.tokens["loss"])


def test_before_any_training_step() -> None:
    case = ZOO["tied_gpt"]
    plan = gc.Plan(stages=2, backend="eager", quiet=True)
    batches = case.microbatches(2)
    first, second = (VirtualStep(case.build(), case.loss_fn, plan=plan) for _ in range(2))
    first.evaluate(batches)
    one, two = first.run(batches), second.run(batches)
    assert one.result.loss.item() == two.result.loss.item()
    assert all(torch.equal(value, two.gradients[name]) for name, value in one.gradients.items())


class Headed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(3, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x).relu())


@dataclass
class Run:
    """Training as it is often written: a schedule for the rate, and an average of the weights."""

    model: nn.Module
    average: AveragedModel
    optimizer: torch.optim.Optimizer
    rates: OneCycleLR

    @staticmethod
    def of(model: nn.Module) -> Run:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        return Run(model, average, optimizer, OneCycleLR(optimizer, 0.5, total_steps=5))

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.rates.step()
        self.average.update_parameters(self.model)
        with torch.no_grad():  # a projection, as some methods have after each update
            self.model.head.weight.clamp_(-0.3, 0.3)


def test_what_changes_parameters_between_steps_is_followed() -> None:
    model = Headed()
    run, eager = Run.of(model), Run.of(copy.deepcopy(model))
    step = gc.compile_train_step(model, squared, plan=EAGER)
    averaged = gc.compile_train_step(run.average.module, squared, plan=EAGER)
    for number in range(4):
        batch = torch.randn(5, 3, generator=torch.Generator().manual_seed(number))
        result = step([batch])
        loss = eager.model(batch).square().sum() / 5
        loss.backward()
        assert result.loss.item() == pytest.approx(loss.item(), rel=1e-6)
        run.update(), eager.update()
        with torch.no_grad():
            expected = eager.average(batch).square().sum() / 5
        assert averaged.evaluate([batch]).loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert step.stats.traces == averaged.stats.traces == 1
