"""One program serves all lengths, numbers of rows and numbers of microbatches."""

from __future__ import annotations

import functools
import random

import pytest
import torch
from torch import Tensor, nn

from graphcomp import TokenLoss
from tests.cases.tiny import IGNORED, LAYOUTS, assert_equal, next_token, rows, step_of, tiny_gpt


@functools.cache
def gpt() -> nn.Module:
    return tiny_gpt()


@pytest.mark.parametrize(("stages", "schedule"), LAYOUTS)
def test_lengths_that_differ_between_steps_and_within_one(stages: int, schedule: str) -> None:
    step = step_of(gpt(), next_token, stages, schedule)
    for length in (16, 24, 8, 16):
        assert_equal(gpt(), next_token, [rows(2, length, seed) for seed in range(4)], step)
    assert_equal(gpt(), next_token, [rows(2, length, length) for length in (16, 8, 24, 16)], step)
    assert step.compiler.traces == 1
    assert step.compiler.backend.programs <= 3 * stages


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_random_lengths_need_one_program_and_another_for_length_one(stages: int) -> None:
    draw = random.Random(stages)
    step = step_of(gpt(), next_token, stages)
    lengths = [2, 64, 1, *(draw.randint(2, 64) for _ in range(7))]
    for number, length in enumerate(lengths):
        batch = rows(draw.randint(2, 3), max(length, 2), number)
        assert_equal(gpt(), next_token, [{name: leaf[:, :length] for name, leaf in batch.items()}], step)
    assert step.compiler.traces == 2


@pytest.mark.parametrize("stages", [2, 4])
def test_more_and_fewer_microbatches_than_stages(stages: int) -> None:
    step = step_of(gpt(), next_token, stages)
    assert_equal(gpt(), next_token, [rows(2, 8)], step)
    programs = step.compiler.backend.programs
    for number in (3, 5, 1, 9):
        ran, _ = assert_equal(gpt(), next_token, [rows(2, 5 + seed, seed) for seed in range(number)], step)
        # One payload a cut and microbatch in each direction, and none about shapes.
        assert ran.messages == 2 * number * (stages - 1)
    assert step.compiler.traces == 1
    assert step.compiler.backend.programs <= programs + 2 * stages  # those that the first step had fused


class Ones(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.w) * x.shape[0]


def total(y: Tensor, batch: Tensor) -> TokenLoss:
    return TokenLoss(y.sum(), y.shape[0] * 2)


def test_sizes_in_the_code_are_those_of_each_microbatch() -> None:
    step = step_of(Ones(), total)
    three, five = step.run([torch.ones(3, 2)]), step.run([torch.ones(5, 2)])
    assert step.compiler.traces == 1
    assert float(three.result.loss) == 3 * 3 * 2 / 6
    assert float(five.result.loss) == 5 * 5 * 2 / 10
    assert five.gradients["w"].tolist() == [2.5, 2.5]


def test_what_crosses_is_exactly_the_planned_bytes() -> None:
    step = step_of(gpt(), next_token, 2, split=["blocks.1"])
    lengths = (16, 24, 8, 3)
    ran = step.run([rows(2, length, length) for length in lengths])
    assert ran.messages == 2 * 4
    assert ran.bytes_sent == sum(2 * (2 * length * 32 * 4) for length in lengths)


def test_equal_lengths_pay_nothing_for_free_ones() -> None:
    step = step_of(gpt(), next_token, 4)
    equal = step.run([rows(2, 16, seed) for seed in range(4)])
    ragged = step.run([rows(2, length, length) for length in (20, 12, 28, 4)])
    assert (equal.messages, equal.bytes_sent) == (ragged.messages, ragged.bytes_sent)


class Pairs(nn.Module):
    """Numbers of pairs and triples: products of sizes, powers too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        scores = (h @ h.mT).mean() + torch.einsum("id,jd,kd->ijk", h, h, h).mean()
        return self.second(h * scores).unsqueeze(0).expand(x.shape[0], -1, -1).mean(0)


@pytest.mark.parametrize("stages", [1, 2])
def test_means_over_products_of_sizes(stages: int) -> None:
    model = tiny_gpt(Pairs)

    def loss_fn(y: Tensor, batch: Tensor) -> TokenLoss:
        return TokenLoss(y.square().sum(), batch.shape[0] ** 2)

    step = step_of(model, loss_fn, stages)
    assert_equal(model, loss_fn, [torch.randn(number, 4) for number in (3, 5, 7)], step)
    assert step.compiler.traces == 1


def without_rows(length: int = 8) -> dict[str, Tensor]:
    return {name: leaf[:0] for name, leaf in rows(2, length).items()}


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_microbatch_without_rows_adds_nothing(stages: int, place: int) -> None:
    step = step_of(gpt(), next_token, stages)
    batches = [rows(2, 8, 1), rows(3, 5, 2)]
    plain, _ = assert_equal(gpt(), next_token, batches, step)
    with_empty = [*batches[:place], without_rows(), *batches[place:]]
    ran, _ = assert_equal(gpt(), next_token, with_empty, step)
    assert torch.equal(ran.result.loss, plain.result.loss)
    assert torch.equal(ran.result.tokens["loss"], plain.result.tokens["loss"])
    assert ran.result.microbatch_losses[place].item() == 0.0
    for name, gradient in plain.gradients.items():
        assert torch.equal(ran.gradients[name], gradient), name


@pytest.mark.parametrize("stages", [1, 2])
def test_a_step_of_nothing_is_zero(stages: int) -> None:
    step = step_of(gpt(), next_token, stages)
    ran, _ = assert_equal(gpt(), next_token, [without_rows(), without_rows(5)], step)
    assert ran.result.loss.item() == 0.0 and int(ran.result.tokens["loss"]) == 0
    assert all(gradient is not None and not gradient.any() for gradient in ran.gradients.values())
    no_length = {name: leaf[:, :0] for name, leaf in rows(2, 8).items()}
    assert_equal(gpt(), next_token, [rows(2, 8), no_length], step)


@pytest.mark.parametrize("stages", [1, 2])
def test_the_longest_that_the_model_has_positions_for_and_one_more(stages: int) -> None:
    longest = gpt().positions.num_embeddings
    step = step_of(gpt(), next_token, stages)
    for length in (3, longest, 1 + longest // 2):
        assert_equal(gpt(), next_token, [rows(2, length)], step)
    with pytest.raises(IndexError):  # what eager raises
        step.run([rows(2, longest + 1)])
    assert_equal(gpt(), next_token, [rows(2, longest), rows(1, longest)], step)
    assert step.compiler.traces == 2  # one row has its own


def test_a_mask_of_all_labels_at_length_one() -> None:
    step = step_of(gpt(), next_token, 2)
    one = {"tokens": torch.tensor([[3], [5]]), "labels": torch.tensor([[IGNORED], [IGNORED]])}
    assert_equal(gpt(), next_token, [one, rows(2, 6)], step)
    assert_equal(gpt(), next_token, [one], step)
