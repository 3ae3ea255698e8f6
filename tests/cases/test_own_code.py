"""Hooks, custom autograd Functions and random numbers in the user's code mean what they mean in eager."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from graphcomp import TokenLoss
from graphcomp.errors import StateError
from graphcomp.ir.randomness import step_seeds
from tests.cases.tiny import LAYOUTS, assert_equal, divided, next_token, rows, step_of, tiny_gpt


def total(y: Tensor, batch: Tensor) -> TokenLoss:
    return TokenLoss(y.sum(), 1)


def ones_model() -> nn.Linear:
    model = nn.Linear(3, 1)
    nn.init.ones_(model.weight)
    return model


def doubled(module: nn.Module, given: object, output: Tensor) -> Tensor:
    return output * 2


def test_a_forward_hook_is_part_of_the_program() -> None:
    model = ones_model()
    model.register_forward_hook(doubled)
    ran, _ = assert_equal(model, total, [torch.ones(1, 3)], step_of(model, total))
    assert ran.gradients["weight"].tolist() == [[2.0, 2.0, 2.0]]


def test_a_gradient_hook_is_part_of_the_program_too() -> None:
    model = nn.Sequential(ones_model())
    model[0].register_forward_hook(doubled)
    model[0].weight.register_hook(lambda gradient: gradient * 3)
    ran = step_of(model, total).run([torch.ones(1, 3)])
    assert ran.gradients["0.weight"].tolist() == [[6.0, 6.0, 6.0]]


def test_a_hook_behind_the_gradient_is_refused_whenever_it_comes() -> None:
    model = nn.Sequential(ones_model())
    step = step_of(model, total)
    step.run([torch.ones(1, 3)])
    model[0].weight.register_post_accumulate_grad_hook(lambda parameter: None)
    with pytest.raises(StateError, match=r"0.weight"):
        step.run([torch.ones(1, 3)])


class Seven(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return torch.full_like(gradient, 7)


class UsesSeven(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return Seven.apply(x * self.first) * self.second


@pytest.mark.parametrize(("stages", "schedule"), LAYOUTS[:4])
def test_a_custom_function_keeps_its_own_backward(stages: int, schedule: str) -> None:
    model = UsesSeven()
    ran, _ = assert_equal(model, total, [torch.ones(3)], step_of(model, total, stages, schedule))
    assert ran.gradients["first"].tolist() == [7.0, 7.0, 7.0]


class Dropped(nn.Module):
    """h = dropout(x @ w); w is the unit matrix, so that h shows the mask that forward drew."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.eye(width))
        self.same = nn.Parameter(torch.eye(width), requires_grad=False)
        self.last = nn.Parameter(torch.eye(width), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        h = nn.functional.dropout(x @ self.w, 0.5)
        return h @ self.same @ self.last


def squares(h: Tensor, batch: Tensor) -> TokenLoss:
    return TokenLoss(h.square().sum(), 1)


@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize(("stages", "schedule"), [(1, "1f1b"), (2, "gpipe"), (2, "1f1b"), (3, "gpipe"), (3, "1f1b")])
def test_the_mask_of_the_backward_is_that_of_the_forward(stages: int, schedule: str, microbatches: int) -> None:
    model = Dropped()
    step = step_of(model, squares, stages, schedule)
    given = [torch.randn(4 + i, 32) for i in range(microbatches)]
    torch.manual_seed(5)
    ran = step.run(given, "all")
    expected, masks = torch.zeros(32, 32), []
    for x, h in zip(given, ran.result.outputs, strict=True):
        mask = (h != 0).float()
        torch.testing.assert_close(h, 2 * x * mask)  # kept values are doubled
        assert 0.2 < float(mask.mean()) < 0.8
        expected += x.t() @ (2 * h * mask * 2) / microbatches
        masks.append(mask)
    torch.testing.assert_close(ran.gradients["w"], expected)
    if microbatches > 1:
        assert not torch.equal(masks[0][:4], masks[1][:4])
    torch.manual_seed(5)
    again = step.run(given, "all")
    assert torch.equal(again.gradients["w"], ran.gradients["w"])
    other = step.run(given, "all")
    assert not torch.equal(other.gradients["w"], ran.gradients["w"])


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_cut_programs_draw_alike_at_every_number_of_stages(schedule: str) -> None:
    model, given = Dropped(), [torch.randn(4 + i, 32) for i in range(3)]
    found = []
    for stages in (2, 3):
        torch.manual_seed(5)
        found.append(step_of(model, squares, stages, schedule).run(given).gradients["w"])
    assert torch.equal(*found)
    assert len(step_seeds(3)) == 3


class Checkpointed(nn.Module):
    def __init__(self, p: float) -> None:
        super().__init__()
        self.first, self.second, self.p = nn.Linear(8, 8), nn.Linear(8, 8), p

    def inner(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(torch.tanh(self.first(x)), self.p, self.p > 0)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(checkpoint(self.inner, x, use_reentrant=False))


def test_checkpoint_with_random_numbers() -> None:
    model = Checkpointed(0.5)
    assert_equal(model, total, [torch.randn(rows, 8) for rows in (2, 5, 3)], step_of(model, total))


@pytest.mark.parametrize(("stages", "schedule"), LAYOUTS[:4])
def test_checkpoint_without_random_numbers(stages: int, schedule: str) -> None:
    model = Checkpointed(0.0)
    given = [torch.randn(rows, 8) for rows in (2, 5, 3)]
    assert_equal(model, total, given, step_of(model, total, stages, schedule))


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_equal_steps_are_bitwise_equal(stages: int) -> None:
    model, microbatches = tiny_gpt(), divided(rows(8), 4)
    step = step_of(model, next_token, stages)
    first = step.run(microbatches)
    for _ in range(4):
        again = step.run(microbatches)
        assert torch.equal(again.result.loss, first.result.loss)
        for name, gradient in first.gradients.items():
            assert torch.equal(again.gradients[name], gradient), name
