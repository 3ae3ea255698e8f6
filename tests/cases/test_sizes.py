"""Code that computes with sizes, and decides on them: one program where it can be one, and never a wrong one."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graphcomp import TokenLoss, token_loss
from graphcomp.errors import CaptureError, GuardError
from tests.cases.tiny import assert_equal, next_token, relative, rows, step_of, tiny_gpt
from tests.zoo.gpt import TinyGPT
from tests.zoo.reference import reference

WIDTH = 4
Function = Callable[["Sized", Tensor, Tensor], Tensor]


class Sized(nn.Module):
    """Two inputs of a length each; what `function` does with them stands between layers."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function
        self.first, self.second, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1, stride=2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.last(self.function(self, torch.tanh(self.first(x)), torch.tanh(self.second(y))))


def total(output: Tensor, batch: dict[str, Tensor]) -> TokenLoss:
    return TokenLoss(output.square().sum(), batch["x"].shape[0])


def pair(x: int, y: int) -> dict[str, Tensor]:
    return {"x": torch.randn(x, WIDTH, dtype=torch.float64), "y": torch.randn(y, WIDTH, dtype=torch.float64)}


def check(function: Function, sizes: list[tuple[int, int]], traces: int | None, stages: int = 2) -> None:
    """One step a pair of sizes, then one with a microbatch of each: all equal eager, after so many captures."""
    model = tiny_gpt(lambda: Sized(function)).double()
    step = step_of(model, total, stages, max_programs=30)
    for each in sizes:
        assert_equal(model, total, [pair(*each)], step, 1e-10)
    assert_equal(model, total, [pair(*each) for each in sizes], step, 1e-10)
    assert traces is None or step.compiler.traces == traces


def pooled(model: Sized, h: Tensor, g: Tensor) -> Tensor:
    return F.avg_pool1d(h.mT[None], 2, 2)[0].mT + model.conv(g.mT[None])[0].mT.sum(0)


FREE: dict[str, Function] = {
    "products": lambda m, h, g: h * h.shape[0] ** 2 + h.shape[0] * g.shape[0],
    "fractions": lambda m, h, g: h * (h.shape[0] / 2) * (g.shape[0] + 1) ** -0.5 + math.ceil(h.shape[0] / 3),
    "a rest": lambda m, h, g: h * (h.shape[0] % 3),
    "bits": lambda m, h, g: h * (h.shape[0] ^ 1) + (h.shape[0] & 3) + ~g.shape[0],
    "whole and rest": lambda m, h, g: h * divmod(h.shape[0], 3)[0] + divmod(100, g.shape[0])[1],
    "the larger": lambda m, h, g: h * torch.sym_max(h.shape[0], g.shape[0]) + torch.sym_min(h.shape[0], 5),
    "elements and strides": lambda m, h, g: h / h.numel() + h.mT.contiguous().stride(0),
    "half": lambda m, h, g: h[: h.shape[0] // 2] * 2,
    "every second": lambda m, h, g: h[1::2] + g[::3].sum(0),
    "the last three": lambda m, h, g: h[-2:],
    "up to a multiple of 8": lambda m, h, g: F.pad(h, (0, 0, 0, -h.shape[0] % 8)),
    "pairs": lambda m, h, g: h[: h.shape[0] // 2 * 2].view(-1, 2, WIDTH).sum(1),
    "pools and strides": pooled,
    "a mask": lambda m, h, g: torch.ones(h.shape[0], h.shape[0], dtype=h.dtype).tril() @ h,
    "an outer product": lambda m, h, g: (h @ g.mT).softmax(-1) @ g,
    "all pairs in a row": lambda m, h, g: (h @ h.mT).flatten().softmax(0).view(h.shape[0], -1) @ h * h.shape[0],
    "expanded": lambda m, h, g: h.sum(0).expand(g.shape[0], WIDTH) + g,
    "repeated": lambda m, h, g: h.repeat_interleave(2, 0) * torch.arange(2 * h.shape[0])[:, None],
    "rolled": lambda m, h, g: h.roll(h.shape[0] // 2, 0) * torch.arange(h.shape[0])[:, None],
    "interpolated": lambda m, h, g: F.interpolate(h.mT[None], size=g.shape[0], mode="linear")[0].mT,
}


@pytest.mark.parametrize("name", FREE)
def test_arithmetic_on_sizes_needs_one_program(name: str) -> None:
    check(FREE[name], [(4, 4), (6, 5), (12, 7), (9, 16)], traces=1)


@pytest.mark.parametrize("name", sorted(FREE.keys() - {"pools and strides"}))  # which refuses to pool one
def test_arithmetic_on_sizes_of_one_and_on_sizes_that_become_one(name: str) -> None:
    check(FREE[name], [(5, 7), (1, 4), (3, 1), (1, 1), (2, 3)], traces=None)


BRANCHES: dict[str, tuple[int, Function]] = {
    "short and long": (2, lambda m, h, g: h * 2 if h.shape[0] < 5 else h * 3),
    "an interval": (2, lambda m, h, g: h * 2 if 3 < h.shape[0] < 6 else h * 3),
    "odd and even": (2, lambda m, h, g: -h if h.shape[0] % 2 else h),
    "the shorter one": (2, lambda m, h, g: h + g.sum(0) if h.shape[0] < g.shape[0] else h - g.sum(0)),
    "equal sizes": (2, lambda m, h, g: h * g if h.shape == g.shape else torch.cat([h, g])),
    "as wide as a weight": (2, lambda m, h, g: h * m.first.weight if h.shape[0] == WIDTH else h),
    "a multiple": (2, lambda m, h, g: h.view(-1, 3, WIDTH).sum(1) if h.shape[0] % 3 == 0 else h),
    "padded if it has to be": (2, lambda m, h, g: F.pad(h, (0, 0, 0, 8 - h.shape[0] % 8)) if h.shape[0] % 8 else h),
    "the smaller of two": (2, lambda m, h, g: h[: min(h.shape[0], g.shape[0])] + g[: min(h.shape[0], g.shape[0])]),
}


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("name", BRANCHES)
def test_a_branch_on_a_size_is_a_program_for_each_side(name: str, stages: int) -> None:
    programs, function = BRANCHES[name]
    check(function, [(4, 4), (6, 4), (8, 9), (5, 5), (7, 12), (24, 8), (4, 6)], programs, stages)


NUMBERS: dict[str, Function] = {
    "int": lambda m, h, g: h * int(h.shape[0]),
    "square root": lambda m, h, g: h / math.sqrt(h.shape[0]),
    "len": lambda m, h, g: h / len(h),
    "a text": lambda m, h, g: h * len(f"{'x' * h.shape[0]}{h.shape[0]:04d}") + (f"{h.shape[0]}" == "4"),
    "a shape as text": lambda m, h, g: h * int(str(h.shape).split("[")[1].split(",")[0]),
    "a key": lambda m, h, g: h * {3: 1.5, 4: 2.0, 6: 2.5}[int(h.shape[0])],
    "a loop": lambda m, h, g: h + sum(h[i] * i for i in range(h.shape[0])),
    "a tensor": lambda m, h, g: h * torch.tensor(h.shape[0]),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_a_size_made_a_plain_number_is_a_program_for_each(name: str) -> None:
    check(NUMBERS[name], [(4, 4), (6, 3), (3, 5), (4, 2)], traces=3)


def test_a_size_as_a_key_is_refused_with_a_remedy() -> None:
    def halves(size: int) -> int:
        return size // 2

    uses: list[Function] = [
        lambda m, h, g: h * {4: 2.0}[h.shape[0]],
        lambda m, h, g: h * (h.shape[0] in {4, 5}),
        lambda m, h, g: h * functools.cache(halves)(h.shape[0]),
    ]
    for use in uses:
        step = step_of(tiny_gpt(lambda use=use: Sized(use)).double(), total)
        with pytest.raises(CaptureError, match="uses a size of the batch as a key") as caught:
            step.run([pair(4, 4)])
        assert f"test_sizes.py:{use.__code__.co_firstlineno}" in str(caught.value.where)
        assert "table[int(n)]" in str(caught.value.do)


def test_a_shape_of_bits() -> None:
    def rest(model: Sized, h: Tensor, g: Tensor) -> Tensor:
        return torch.cat([h, h.new_zeros(h.shape[0] & 3, WIDTH), g[: g.shape[0] ^ 1]])

    check(rest, [(6, 5), (9, 16)], traces=None)


def test_a_loop_over_no_rows() -> None:
    check(lambda m, h, g: g + sum(row * 2 for row in h), [(3, 2), (0, 4)], traces=2)


def test_too_many_sizes_are_named_with_a_remedy() -> None:
    model = tiny_gpt(lambda: Sized(NUMBERS["square root"])).double()
    step = step_of(model, total, max_programs=2)
    for size in (4, 6):
        step.run([pair(size, 3)])
    with pytest.raises(GuardError) as caught:
        step.run([pair(9, 3)])
    assert "x has shape (9, 4), expected (6, 4)" in str(caught.value)
    assert "make a plain number of a size: int(n), float(n), math.sqrt(n)" in str(caught.value)
    assert "table[torch.arange(n)]" in str(caught.value)
    step.run([pair(4, 7), pair(6, 8)])


def test_equal_sizes_of_the_example_are_not_tied() -> None:
    """Rows, length and width of the example are all the same number, which is also a parameter's size."""

    class Cube(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, bias: Tensor, other: Tensor) -> Tensor:
            return self.second(torch.tanh(self.first(x)) + bias[:, None]) + other.sum(0)

    def loss_fn(output: Tensor, batch: dict[str, Tensor]) -> TokenLoss:
        return TokenLoss(output.square().sum(), batch["weights"].sum())

    def batch(number: int, length: int, others: int, weights: int) -> dict[str, Tensor]:
        shapes = {"x": (number, length, WIDTH), "bias": (number, WIDTH), "other": (others, WIDTH)}
        return {**{name: torch.randn(shape) for name, shape in shapes.items()}, "weights": torch.rand(weights)}

    model = tiny_gpt(Cube)
    step = step_of(model, loss_fn, 2)
    for sizes in ((4, 4, 4, 4), (4, 5, 6, 7), (7, 4, 4, 5), (2, 9, 3, 4)):
        assert_equal(model, loss_fn, [batch(*sizes), batch(*sizes[::-1])], step)
    assert step.compiler.traces == 1


@pytest.mark.parametrize("stages", [1, 2])
def test_sizes_that_the_model_ties_must_be_equal(stages: int) -> None:
    model = tiny_gpt()
    step = step_of(model, next_token, stages)
    assert_equal(model, next_token, [rows(2, 8)], step)
    wrong = {**rows(2, 8), "labels": rows(2, 9)["labels"]}
    with pytest.raises(Exception, match="labels"):
        step.run([rows(2, 8), wrong])
    assert_equal(model, next_token, [rows(3, 8)], step)
    assert step.compiler.traces == 1


class Smoothed(TinyGPT):
    """A number of each step in the model, and one in the loss."""

    def forward(self, tokens: Tensor, scale: Any = 1.0) -> Tensor:
        return super().forward(tokens) * scale


def smoothed(logits: Tensor, batch: dict[str, Any]) -> Any:
    return token_loss(logits, batch["labels"], label_smoothing=batch.get("smoothing", 0.0))


def test_a_number_that_changes_is_another_program_up_to_the_limit() -> None:
    model = tiny_gpt(Smoothed)
    step = step_of(model, smoothed, 2, max_programs=3)
    for number, smoothing in enumerate((0.0, 0.1, 0.1 + 0.2, 0.1, 0.0)):
        assert_equal(model, smoothed, [{**rows(2, 5 + number), "smoothing": smoothing}], step)
        assert step.compiler.traces == min(number + 1, 3)
    with pytest.raises(GuardError, match=r"smoothing: 0\.30000000000000004\} and is .*smoothing: 0\.3\}"):
        step.run([{**rows(2, 8), "smoothing": 0.3}])


def test_a_number_in_a_tensor_may_change_at_every_step() -> None:
    model = tiny_gpt(Smoothed)
    step = step_of(model, smoothed, 2)
    for number in range(4):
        batch, scale = rows(2, 5 + number), 1.0 - 0.3 * number
        ran, _ = assert_equal(model, smoothed, [{**batch, "scale": torch.tensor(scale)}], step)
        assert relative(ran.result.loss, reference(model, smoothed, [{**batch, "scale": scale}]).loss) < 1e-6
    assert step.compiler.traces == 1
