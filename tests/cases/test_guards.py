"""What a program was specialised on may change: each change is followed, needs another program, or raises."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphcomp import TokenLoss
from graphcomp.errors import CaptureError, GraphcompError, GuardError, PartitionError
from tests.cases.tiny import IGNORED, assert_equal, next_token, rows, step_of, tiny_gpt


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.drop = nn.Dropout(0.0)
        self.scale = 2.0

    def forward(self, x: Tensor, power: float = 1.0) -> Tensor:
        x = torch.tanh(self.first(x)) * self.scale
        return self.second(self.drop(x)) ** power


def total(y: Tensor, batch: Any) -> TokenLoss:
    return TokenLoss(y.sum(), y.numel())


def change_scale(model: Small) -> None:
    model.scale = 4.0


def change_mode(model: Small) -> None:
    model.drop.p = 1.0
    model.eval()


def change_dropout(model: Small) -> None:
    model.drop.p = 1.0


def freeze(model: Small) -> None:
    model.first.requires_grad_(False)


def thaw(model: Small) -> None:
    model.first.requires_grad_(True)


def change_forward(model: Small) -> None:
    def other(self: nn.Linear, x: Tensor) -> Tensor:
        return x @ self.weight * 3.0

    model.second.forward = types.MethodType(other, model.second)


def double_precision(model: Small) -> None:
    model.double()
    model.register_forward_pre_hook(lambda module, given: tuple(x.double() for x in given))


def tie(model: Small) -> None:
    model.second.weight = model.first.weight


def transpose(model: Small) -> None:
    model.first.weight.data = model.first.weight.data.t()


def replace_layer(model: Small) -> None:
    model.second = nn.Sequential(nn.Linear(4, 4), nn.ReLU())


CHANGES = [
    change_scale,
    change_mode,
    change_dropout,
    freeze,
    thaw,
    change_forward,
    double_precision,
    tie,
    transpose,
    replace_layer,
]


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_model_is_followed(change: Callable[[Small], None], stages: int) -> None:
    model = tiny_gpt(Small)
    if change is thaw:
        freeze(model)
    step = step_of(model, total, stages)
    assert_equal(model, total, [torch.randn(3, 4)], step)
    change(model)
    if change is tie and stages == 2:  # the second stage would use what only the first one holds and trains
        with pytest.raises(PartitionError, match="would be used on another stage than the one that holds it"):
            step.run([torch.randn(3, 4)])
        return
    assert_equal(model, total, [torch.randn(3, 4)], step)
    assert step.compiler.traces == 2


def small(x: Tensor, **others: Any) -> dict[str, Any]:
    return {"x": x, **others}


BATCHES = {
    "rank": (small(torch.randn(3, 4)), small(torch.randn(2, 3, 4))),
    "dtype": (small(torch.randn(3, 4)), small(torch.randn(3, 4).double())),
    "stride": (small(torch.randn(3, 4)), small(torch.randn(4, 3).t())),
    "part of a larger tensor": (small(torch.randn(3, 4)), small(torch.randn(9, 7)[2:8:2, 1:5])),
    "expanded": (small(torch.randn(3, 4)), small(torch.randn(4).expand(3, 4))),
    "from strided to dense": (small(torch.randn(4, 3).t()), small(torch.randn(3, 4))),
    "one row": (small(torch.randn(3, 4)), small(torch.randn(1, 4))),
    "a number": (small(torch.randn(3, 4), power=1.0), small(torch.randn(3, 4), power=2.0)),
    "int for float": (small(torch.randn(3, 4), power=2.0), small(torch.randn(3, 4), power=2)),
    "absent": (small(torch.randn(3, 4), power=2.0), small(torch.randn(3, 4))),
}


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("name", BATCHES)
def test_a_changed_form_of_the_batch_is_followed(name: str, stages: int) -> None:
    before, after = BATCHES[name]
    model = tiny_gpt(Small)
    if name == "dtype":
        model.register_forward_pre_hook(
            lambda module, args, kwargs: (args, {**kwargs, "x": kwargs["x"].float()}), with_kwargs=True
        )
    step = step_of(model, total, stages)
    for batch in (before, after, before):
        assert_equal(model, total, [batch], step)
    assert step.compiler.traces <= 2


class Strided(nn.Module):
    """Asks for memory as it lies, and writes to one field of the batch while it reads another."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(()))

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.w * (a + 2 * b.flatten().view(a.shape))


@pytest.mark.parametrize("stages", [1])
def test_the_same_tensor_in_two_fields_is_no_tie(stages: int) -> None:
    model, same = Strided(), torch.randn(3, 4)
    step = step_of(model, total, stages)
    for batch in ({"a": same, "b": same}, {"a": same, "b": torch.randn(3, 4)}, {"a": same, "b": same[:]}):
        assert_equal(model, total, [batch], step)


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, more: Any) -> Tensor:
        for term in more["terms"]:
            x = x + term
        return self.linear(x)


def test_another_structure_is_another_program() -> None:
    model = tiny_gpt(Nested)
    step = step_of(model, total, 1)
    one, two = torch.randn(3, 4), torch.randn(3, 4)
    for terms in ([one], [one, two], (one, two), [], [one]):
        assert_equal(model, total, [{"x": torch.randn(3, 4), "more": {"terms": terms}}], step)
    assert step.compiler.traces == 4


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.short, self.long = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.short(x) if x.shape[0] < 6 else self.long(x)


@pytest.mark.parametrize("stages", [1])
def test_a_size_that_crosses_a_branch_is_another_program(stages: int) -> None:
    model = tiny_gpt(Branches)
    step = step_of(model, total, stages)
    for number in (3, 8, 5, 6, 12):
        assert_equal(model, total, [torch.randn(number, 4)], step)
    assert_equal(model, total, [torch.randn(number, 4) for number in (3, 8, 5)], step)
    assert step.compiler.traces == 2


def test_closure_tensors_are_read_anew() -> None:
    weight, numbers = torch.ones(4), [1.0]

    def weighed(y: Tensor, batch: Any) -> TokenLoss:
        return TokenLoss((y * weight).sum() * numbers[0], y.numel())

    model = tiny_gpt(Small)
    step = step_of(model, weighed)
    assert_equal(model, weighed, [torch.randn(3, 4)], step)
    weight.mul_(3)
    assert_equal(model, weighed, [torch.randn(3, 4)], step)
    weight = torch.randn(4)
    assert_equal(model, weighed, [torch.randn(3, 4)], step)
    assert step.compiler.traces == 1
    numbers[0] = 5.0
    assert_equal(model, weighed, [torch.randn(3, 4)], step)
    assert step.compiler.traces == 2


@pytest.mark.parametrize(
    "other", [torch.ones(1), torch.ones(()), torch.ones(4, dtype=torch.float64), torch.randn(8)[::2], None]
)
def test_a_closure_tensor_of_another_form_is_followed_or_refused_by_name(other: Tensor | None) -> None:
    weight: Any = torch.ones(4)

    def weighed(y: Tensor, batch: Any) -> TokenLoss:
        return TokenLoss((y * weight).sum() * weight.numel() if weight is not None else y.sum(), y.numel())

    model = tiny_gpt(Small)
    step = step_of(model, weighed)
    assert_equal(model, weighed, [torch.randn(3, 4)], step)
    weight = other
    try:
        assert_equal(model, weighed, [torch.randn(3, 4)], step)
    except GuardError as error:
        assert "weight" in str(error)


def test_the_count_of_the_first_step_is_no_number_in_the_program() -> None:
    model = tiny_gpt()
    step = step_of(model, next_token, 2)

    def batch(valid: int) -> dict[str, Tensor]:
        found = rows(4, 16)
        found["labels"] = torch.full((64,), IGNORED)
        found["labels"][:valid] = 7
        return {**found, "labels": found["labels"].view(4, 16)}

    for valid in (5, 50, 13):
        ran, _ = assert_equal(model, next_token, [batch(valid)], step)
        assert int(ran.result.tokens["loss"]) == valid
    literals = {
        argument
        for node in step.latest[0].specialisation.joint.program.calls()
        for argument in (*node.args, *node.kwargs.values())
        if isinstance(argument, (int, float))
    }
    assert 5 not in literals and 0.2 not in literals


class Refuses(Small):
    def forward(self, x: Tensor, power: float = 1.0) -> Tensor:
        self.drop.p = self.drop.p  # an attribute that is written, and stays what it was
        if power > 1.5 and bool(x.sum() > 0):
            return x
        return super().forward(x, power)


def test_a_failed_capture_changes_nothing_and_can_be_tried_again() -> None:
    model = tiny_gpt(Refuses)
    step = step_of(model, total, 2)
    keys, state = list(vars(model)), {name: value.clone() for name, value in model.state_dict().items()}
    stream = torch.get_rng_state()
    with pytest.raises(CaptureError, match="contents of a tensor"):
        step.run([{"x": torch.ones(3, 4), "power": 2.0}])
    assert list(vars(model)) == keys
    assert torch.equal(torch.get_rng_state(), stream)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(type(p) is nn.Parameter and p.grad is None for p in model.parameters())
    assert_equal(model, total, [{"x": torch.ones(3, 4), "power": 1.0}], step)


def test_a_step_that_a_later_microbatch_spoils_runs_nothing() -> None:
    model = tiny_gpt(Refuses)
    step = step_of(model, total, 2)
    good, bad = {"x": torch.ones(3, 4), "power": 1.0}, {"x": torch.ones(3, 4), "power": 2.0}
    with pytest.raises(CaptureError):
        step.run([good, bad])
    assert_equal(model, total, [good], step)


def test_what_keeps_changing_is_named_in_the_end() -> None:
    model = tiny_gpt(Small)
    step = step_of(model, total, max_programs=3)
    for number in range(3):
        step.run([{"x": torch.ones(3, 4), "power": 1.0 + number}])
    with pytest.raises(GuardError) as caught:
        step.run([{"x": torch.ones(3, 4), "power": 9.0}])
    assert "power" in str(caught.value) and "3.0" in str(caught.value) and "9.0" in str(caught.value)
    assert isinstance(caught.value, GraphcompError)
    step.run([{"x": torch.ones(5, 4), "power": 2.0}])
