"""A step's loss and gradients are divided by the valid tokens of the whole step, however it is cut up."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor, nn

from graphcomp import TokenLoss, token_loss
from tests.cases.tiny import (
    IGNORED,
    LAYOUTS,
    PARAMETERS,
    assert_equal,
    dealt,
    divided,
    next_token,
    relative,
    rows,
    step_of,
    tiny_gpt,
)


class Scale(nn.Module):
    """w * x, in as many factors as there may be stages; only the first is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(()))
        self.ones = nn.ParameterList(nn.Parameter(torch.ones(()), requires_grad=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.w * x
        for one in self.ones:
            x = one * x
        return x


def summed_where_valid(y: Tensor, batch: dict[str, Tensor]) -> TokenLoss:
    valid = batch["labels"] != IGNORED
    return TokenLoss((y * valid).sum(), valid)


def padded(*values: float) -> dict[str, Tensor]:
    """Valid values first; what is padded holds a large number that must not count."""
    x = torch.full((1, 6), 1000.0)
    labels = torch.full((1, 6), IGNORED)
    x[0, : len(values)], labels[0, : len(values)] = torch.tensor(values), 1
    return {"x": x, "labels": labels}


@functools.cache
def scale() -> Scale:
    return Scale()


@functools.cache
def gpt() -> nn.Module:
    return tiny_gpt()


@pytest.mark.parametrize(("stages", "schedule"), LAYOUTS)
def test_microbatches_weigh_by_their_tokens(stages: int, schedule: str) -> None:
    step = step_of(scale(), summed_where_valid, stages, schedule)
    ran = step.run([padded(1, 1, 1, 1), padded(9)])
    assert float(ran.gradients["w"]) == pytest.approx(13 / 5, abs=1e-6)
    assert float(ran.result.loss) == pytest.approx(2.6, abs=1e-6)
    assert [float(loss) for loss in ran.result.microbatch_losses] == pytest.approx([0.8, 1.8], abs=1e-6)
    ran = step.run([padded(1, 1, 1, 1), padded(9), padded(2, 2), padded(5)])
    assert float(ran.gradients["w"]) == pytest.approx(22 / 8, abs=1e-6)
    assert int(ran.result.tokens["loss"]) == 8


@pytest.mark.parametrize("parameters", PARAMETERS, ids=str)
@pytest.mark.parametrize(("stages", "schedule"), LAYOUTS)
def test_data_ranks_weigh_by_their_tokens(stages: int, schedule: str, parameters: dict) -> None:
    step = step_of(scale(), summed_where_valid, stages, schedule, data_ranks=2, **parameters)
    ran = step.run([[padded(1, 1, 1, 1), padded(9)], [padded(2, 2), padded(5)]])
    assert float(ran.gradients["w"]) == 22 / 8  # not 22, 4.25, 2.8, 1.375 or 5.5
    assert float(ran.result.loss) == 22 / 8
    assert int(ran.result.tokens["loss"]) == 8
    assert [float(loss) for loss in ran.result.microbatch_losses] == [4 / 8, 9 / 8, 4 / 8, 5 / 8]
    ran = step.run([[padded(1, 1, 1, 1), padded()], [padded(), padded(1)]])
    assert (float(ran.gradients["w"]), int(ran.result.tokens["loss"])) == (1.0, 5)


@pytest.mark.parametrize("parameters", PARAMETERS[:2], ids=str)
@pytest.mark.parametrize("stages", [1, 2])
def test_very_unequal_data_ranks_have_one_denominator(stages: int, parameters: dict) -> None:
    few, many = rows(1), rows(2)
    for batch, valid in ((few, 3), (many, 13)):
        batch["labels"] = batch["tokens"].clone()
        batch["labels"].flatten()[valid:] = IGNORED
    step = step_of(gpt(), next_token, stages, data_ranks=2, **parameters)
    ran, _ = assert_equal(gpt(), next_token, [few, many], step)
    assert int(ran.result.tokens["loss"]) == 16


@pytest.mark.parametrize(("stages", "schedule"), LAYOUTS)
def test_the_number_of_microbatches_changes_nothing(stages: int, schedule: str) -> None:
    batch = rows(8)
    step = step_of(gpt(), next_token, stages, schedule)
    _, whole = assert_equal(gpt(), next_token, [batch], step)
    for number in (2, 4, 8):
        ran = step.run(divided(batch, number))
        assert relative(ran.result.loss, whole.loss) <= 1e-5
        assert int(ran.result.tokens["loss"]) == int((batch["labels"] != IGNORED).sum())
        for name, gradient in whole.gradients.items():
            assert relative(ran.gradients[name], gradient) <= 1e-5, name


@pytest.mark.parametrize(("stages", "schedule"), LAYOUTS)
def test_a_microbatch_without_valid_labels_adds_exactly_nothing(stages: int, schedule: str) -> None:
    microbatches = divided(rows(8), 4)
    microbatches[2]["labels"] = torch.full_like(microbatches[2]["labels"], IGNORED)
    step = step_of(gpt(), next_token, stages, schedule)
    ran, _ = assert_equal(gpt(), next_token, microbatches, step)
    assert float(ran.result.microbatch_losses[2]) == 0.0
    without = step.run([batch for i, batch in enumerate(microbatches) if i != 2])
    assert float(without.result.loss) == float(ran.result.loss)
    for name, gradient in without.gradients.items():
        assert torch.equal(ran.gradients[name], gradient), name


@pytest.mark.parametrize(("stages", "schedule"), LAYOUTS)
def test_a_step_without_valid_labels_has_loss_and_gradients_of_exactly_zero(stages: int, schedule: str) -> None:
    microbatches = divided(rows(8), 4)
    for batch in microbatches:
        batch["labels"] = torch.full_like(batch["labels"], IGNORED)
    step = step_of(gpt(), next_token, stages, schedule)
    ran, other = step.run(microbatches), step.run(divided(rows(8), 4))
    assert float(ran.result.loss) == 0.0
    assert int(ran.result.tokens["loss"]) == 0
    assert ran.gradients.keys() == other.gradients.keys()
    assert all(not gradient.count_nonzero() for gradient in ran.gradients.values())
    assert (ran.messages, ran.bytes_sent) == (other.messages, other.bytes_sent)


@pytest.mark.parametrize("parameters", PARAMETERS, ids=str)
@pytest.mark.parametrize("stages", [1, 2])
def test_a_data_rank_without_valid_labels_adds_exactly_nothing_and_sends_the_same(
    stages: int, parameters: dict
) -> None:
    step = step_of(gpt(), next_token, stages, data_ranks=2, **parameters)
    microbatches = divided(rows(8), 4)
    some, _ = assert_equal(gpt(), next_token, microbatches, step)
    for batch in microbatches[2:]:
        batch["labels"] = torch.full_like(batch["labels"], IGNORED)
    half, _ = assert_equal(gpt(), next_token, microbatches, step)
    assert [float(share) for share in half.result.microbatch_losses[2:]] == [0.0, 0.0]
    for batch in microbatches[:2]:
        batch["labels"] = torch.full_like(batch["labels"], IGNORED)
    none = step.run(dealt(microbatches, 2))
    assert (float(none.result.loss), int(none.result.tokens["loss"])) == (0.0, 0)
    assert none.gradients.keys() == some.gradients.keys()
    assert all(not gradient.count_nonzero() for gradient in none.gradients.values())
    for ran in (half, none):
        assert (ran.messages, ran.bytes_sent, ran.collectives) == (some.messages, some.bytes_sent, some.collectives)


@pytest.mark.parametrize("stages", [1, 2])
def test_a_microbatch_without_rows_adds_nothing(stages: int) -> None:
    step = step_of(gpt(), next_token, stages)
    some, none = rows(4), rows(0)
    ran, alone = step.run([some, none]), step.run([some])
    assert torch.equal(ran.result.loss, alone.result.loss)
    for name, gradient in alone.gradients.items():
        assert relative(ran.gradients[name], gradient) <= 1e-6, name


def shifted_inside(logits: Tensor, batch: dict[str, Tensor]) -> TokenLoss:
    return token_loss(logits[:, :-1], batch["labels"][:, 1:])


@pytest.mark.parametrize("stages", [1, 2])
def test_labels_may_be_shifted_before_or_in_the_loss_function(stages: int) -> None:
    inside = divided(rows(8), 2)
    before = [{**batch, "labels": nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=IGNORED)} for batch in inside]
    ran, _ = assert_equal(gpt(), shifted_inside, inside, step_of(gpt(), shifted_inside, stages))
    other, _ = assert_equal(gpt(), next_token, before, step_of(gpt(), next_token, stages))
    assert int(ran.result.tokens["loss"]) == int(other.result.tokens["loss"])
    assert relative(ran.result.loss, other.result.loss) <= 1e-6


def weighed(y: Tensor, batch: dict[str, Tensor]) -> dict[str, TokenLoss]:
    return {"many": TokenLoss((y * batch["many"]).sum(), batch["many"]), "few": TokenLoss(y.square().sum(), 3)}


@pytest.mark.parametrize("stages", [1, 2])
def test_counts_are_exact_beyond_the_integers_of_a_float(stages: int) -> None:
    odd = 2**24 + 1  # no fp32 number; and the sum of four is no int32
    batch = {"x": torch.ones(1, 1), "many": torch.tensor([[odd * 2**6]])}
    ran = step_of(scale(), weighed, stages).run([batch] * 4)
    assert ran.result.tokens["many"].dtype is torch.int64
    assert int(ran.result.tokens["many"]) == 4 * odd * 2**6
    assert int(ran.result.tokens["few"]) == 12
    assert float(ran.result.losses["many"]) == pytest.approx(1.0, abs=1e-6)
    assert float(ran.result.losses["few"]) == pytest.approx(1 / 3, abs=1e-6)
    assert float(ran.gradients["w"]) == pytest.approx(1 + 2 / 3, abs=1e-6)
