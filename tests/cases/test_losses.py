"""Losses and metrics are results: real numbers, by name, in the order of the microbatches."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor, nn

from graphcomp import TokenLoss, mean_loss, metric, token_loss
from tests.cases.tiny import LAYOUTS, PARAMETERS, assert_equal, divided, next_token, relative, rows, step_of, tiny_gpt
from tests.zoo.gpt import Block, TinyGPT


@functools.cache
def gpt() -> nn.Module:
    return tiny_gpt()


@pytest.mark.parametrize(("stages", "schedule"), LAYOUTS)
def test_the_loss_of_each_microbatch_in_order(stages: int, schedule: str) -> None:
    microbatches = divided(rows(8), 4)
    step = step_of(gpt(), next_token, stages, schedule)
    ran, _ = assert_equal(gpt(), next_token, microbatches, step)
    shares = [float(share) for share in ran.result.microbatch_losses]
    assert sum(shares) == pytest.approx(float(ran.result.loss), rel=1e-9)
    backwards = step.run(microbatches[::-1])
    assert [float(share) for share in backwards.result.microbatch_losses] == shares[::-1]


class Penalised(TinyGPT):
    """Some blocks bring a term of their own, as auxiliary losses do."""

    def __init__(self, owners: tuple[int, ...]) -> None:
        super().__init__()
        self.scalars = nn.ParameterDict({str(i): nn.Parameter(torch.tensor(1.5)) for i in owners})

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embed(tokens) + self.positions(torch.arange(tokens.shape[1]))
        penalty = x.new_zeros(())
        for number, block in enumerate(self.blocks):
            x = block(x)
            if str(number) in self.scalars:
                penalty = penalty + 0.01 * self.scalars[str(number)] ** 2
        return self.head(self.norm(x)), penalty


def with_penalty(output: tuple[Tensor, Tensor], batch: dict[str, Tensor]) -> dict:
    return {"lm": token_loss(output[0], batch["labels"]), "penalty": mean_loss(output[1])}


@functools.cache
def penalised(owners: tuple[int, ...]) -> nn.Module:
    return tiny_gpt(functools.partial(Penalised, owners))


@pytest.mark.parametrize("owners", [(0, 1), (0,), (1,)], ids=str)
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_an_auxiliary_mean_loss_counts_once_whatever_the_tokens_and_microbatches(
    stages: int, owners: tuple[int, ...]
) -> None:
    model = penalised(owners)
    splits: dict[int, dict] = {1: {}, 2: {"split": ["blocks.1"]}, 4: {"split": ["blocks.0", "blocks.1", "norm"]}}
    step = step_of(model, with_penalty, **splits[stages])
    for number in (1, 4):
        ran, _ = assert_equal(model, with_penalty, divided(rows(8), number), step)
        for owner in owners:
            assert float(ran.gradients[f"scalars.{owner}"]) == pytest.approx(0.03, abs=1e-7)
        assert float(ran.result.losses["penalty"]) == pytest.approx(0.0225 * len(owners), abs=1e-7)


@pytest.mark.parametrize("parameters", PARAMETERS, ids=str)
@pytest.mark.parametrize("stages", [1, 2])
def test_an_auxiliary_mean_loss_counts_once_whatever_the_data_ranks(stages: int, parameters: dict) -> None:
    model = penalised((0, 1))
    step = step_of(model, with_penalty, stages, data_ranks=2, **parameters)
    for number in (2, 8):  # one and four on each
        ran, _ = assert_equal(model, with_penalty, divided(rows(8), number), step)
        for owner in (0, 1):
            assert float(ran.gradients[f"scalars.{owner}"]) == pytest.approx(0.03, abs=1e-7)
        assert float(ran.result.losses["penalty"]) == pytest.approx(0.045, abs=1e-7)


def accuracy_and_size(logits: Tensor, batch: dict) -> tuple[TokenLoss, dict]:
    loss = token_loss(logits, batch["labels"], label_smoothing=batch["label_smoothing"])
    right = (logits.argmax(-1) == batch["labels"]).sum()
    return loss, {"acc_sum": metric(right, "sum"), "z": logits.logsumexp(-1).square().mean()}


@pytest.mark.parametrize(
    ("stages", "schedule", "data_ranks"), [(2, "1f1b", 1), (4, "gpipe", 1), (1, "1f1b", 2), (2, "1f1b", 2)]
)
def test_metrics_and_a_float_argument_that_changes_between_steps(stages: int, schedule: str, data_ranks: int) -> None:
    step = step_of(gpt(), accuracy_and_size, stages, schedule, data_ranks)
    for traces, smoothing in ((1, 0.0), (2, 0.1), (2, 0.0), (2, 0.1)):
        microbatches = [{**batch, "label_smoothing": smoothing} for batch in divided(rows(8), 4)]
        assert_equal(gpt(), accuracy_and_size, microbatches, step)
        assert step.compiler.traces == traces


def smoothed_by_a_tensor(logits: Tensor, batch: dict) -> TokenLoss:
    plain, labels = token_loss(logits, batch["labels"]), batch["labels"]
    even = (-logits.log_softmax(-1).mean(-1) * (labels != -100)).sum()
    return TokenLoss(torch.lerp(plain.total, even, batch["smoothing"]), plain.tokens)


def test_a_tensor_that_changes_at_every_step_needs_one_program() -> None:
    step = step_of(gpt(), smoothed_by_a_tensor, 2)
    for number in range(12):
        microbatches = [{**batch, "smoothing": torch.tensor(number / 20)} for batch in divided(rows(8), 2)]
        assert_equal(gpt(), smoothed_by_a_tensor, microbatches, step)
    assert step.compiler.traces == 1


def no_metrics(logits: Tensor, batch: dict[str, Tensor]) -> tuple[TokenLoss, dict]:
    return token_loss(logits, batch["labels"]), {}


def one_metric_that_is_the_loss(logits: Tensor, batch: dict[str, Tensor]) -> tuple[TokenLoss, dict]:
    loss = token_loss(logits, batch["labels"])
    return loss, {"total": metric(loss.total, "sum")}


def three_metrics(logits: Tensor, batch: dict[str, Tensor]) -> tuple[TokenLoss, dict]:
    loss = token_loss(logits, batch["labels"])
    return loss, {
        "largest": metric(logits.max(), "max"),
        "rows": metric(logits.shape[0], "sum"),
        "tokens": metric(loss.tokens, "last"),
    }


@pytest.mark.parametrize("loss_fn", [no_metrics, one_metric_that_is_the_loss, three_metrics])
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_any_number_of_metrics(stages: int, loss_fn: object) -> None:
    ran, expected = assert_equal(gpt(), loss_fn, divided(rows(8), 4), step_of(gpt(), loss_fn, stages))
    assert list(ran.result.metrics) == list(expected.metrics)
    if loss_fn is one_metric_that_is_the_loss:
        total = ran.result.metrics["total"] / ran.result.tokens["loss"]
        assert relative(total, ran.result.loss) <= 1e-6


def by_source(logits: Tensor, batch: dict[str, Tensor]) -> dict[str, TokenLoss]:
    """A named loss for each source, with its own count."""
    first = torch.where(batch["source"][:, None] == 0, batch["labels"], -100)
    second = torch.where(batch["source"][:, None] == 1, batch["labels"], -100)
    return {"a": token_loss(logits, first), "b": token_loss(logits, second)}


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_named_losses_have_counts_of_their_own(stages: int) -> None:
    batch = rows(8) | {"source": torch.tensor([0, 0, 0, 0, 0, 1, 1, 1])}
    step = step_of(gpt(), by_source, stages)
    ran, expected = assert_equal(gpt(), by_source, divided(batch, 4), step)
    assert {name: int(count) for name, count in ran.result.tokens.items()} == expected.tokens
    batch["source"] = torch.zeros(8, dtype=torch.int64)  # the second name has nothing in the whole step
    ran, _ = assert_equal(gpt(), by_source, divided(batch, 4), step)
    assert float(ran.result.losses["b"]) == 0.0


class Chain(nn.Module):
    """Block after block, each a stage of its own if need be; the loss is in the model."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(32, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def as_it_is(output: Tensor, batch: object) -> Tensor:
    return output


@pytest.mark.parametrize("stages", [1, 2])
def test_a_plain_scalar_is_a_mean_over_microbatches(stages: int) -> None:
    model = tiny_gpt(Chain)
    microbatches = [torch.randn(2, length, 32) for length in (3, 8, 5)]
    ran, _ = assert_equal(model, as_it_is, microbatches, step_of(model, as_it_is, stages))
    assert int(ran.result.tokens["loss"]) == 3
