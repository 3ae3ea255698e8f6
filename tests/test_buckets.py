"""Declared buckets: few programs, results as without padding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import graphcomp as gc
from graphcomp import testing
from graphcomp.errors import BatchError, PlanError

VOCAB = 11
BUCKETS = gc.Buckets((4, 8, 16), {"tokens": gc.Pad(1, 0), "labels": gc.Pad(-1, -100)})


class Recurrent(nn.Module):
    """A program for each length, as recurrent layers have."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.rnn, self.head = nn.Embedding(VOCAB, 6), nn.GRU(6, 6, batch_first=True), nn.Linear(6, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.rnn(self.embed(tokens))[0])


def loss_fn(logits: Tensor, batch: dict[str, Tensor]) -> gc.TokenLoss:
    return gc.token_loss(logits[:, :-1], batch["labels"])


def batch(length: int, rows: int = 2) -> dict[str, Any]:
    tokens = torch.randint(VOCAB, (rows, length))
    return {"tokens": tokens, "labels": tokens[:, 1:], "name": "kept"}


def test_many_lengths_take_as_many_programs_as_there_are_buckets() -> None:
    model = Recurrent().double()
    step = gc.compile_train_step(model, loss_fn, plan=gc.Plan(backend="eager", buckets=BUCKETS, quiet=True))
    for lengths in ((3, 4, 2), (5, 8, 7), (16, 9), (4, 6, 13), (15, 3)):
        microbatches = [batch(length) for length in lengths]
        model.zero_grad()
        result = step(microbatches)
        tokens = sum(2 * (length - 1) for length in lengths)
        eager = [F.cross_entropy(model(b["tokens"])[:, :-1].mT, b["labels"], reduction="sum") for b in microbatches]
        expected = sum(eager) / tokens
        torch.testing.assert_close(result.loss.double(), expected.detach(), rtol=1e-6, atol=1e-6)
        assert float(result.tokens["loss"]) == tokens
        wanted = torch.autograd.grad(expected, list(model.parameters()))
        for parameter, gradient in zip(model.parameters(), wanted, strict=True):
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-6, atol=1e-8)
    assert step.stats.traces == len(BUCKETS.lengths)


def test_over_stages_the_same() -> None:
    model, microbatches = Recurrent(), [batch(3), batch(7), batch(4)]
    testing.check_parity(model, loss_fn, microbatches, plan=gc.Plan(stages=2, backend="eager", buckets=BUCKETS))


def test_a_misspelt_field_is_noticed_at_the_first_capture() -> None:
    buckets = gc.Buckets((4, 8), {"tokens": gc.Pad(1, 0), "lables": gc.Pad(-1, -100)})
    model = Recurrent()
    step = gc.compile_train_step(model, loss_fn, plan=gc.Plan(backend="eager", buckets=buckets, quiet=True))
    with pytest.raises(PlanError, match=r"names 'lables', which no microbatch has(.|\n)*: tokens, labels, name"):
        step([batch(3), batch(4)])
    assert step.stats.traces == 0 and all(parameter.grad is None for parameter in model.parameters())


def test_some_microbatches_may_lack_a_named_field() -> None:
    buckets = gc.Buckets((4, 8), {"tokens": gc.Pad(1, 0), "labels": gc.Pad(-1, -100), "weights": gc.Pad(1, 0)})
    given = [batch(3), {**batch(3), "weights": torch.ones(2, 3)}]
    step = gc.compile_train_step(Recurrent(), loss_fn, plan=gc.Plan(backend="eager", buckets=buckets, quiet=True))
    step(given)
    step(given[:1])


def test_the_longest_field_grows_to_the_bucket_and_the_others_by_as_much() -> None:
    given = {**batch(6), "other": torch.ones(2, 6)}
    found = BUCKETS.padded(given)
    assert found["tokens"].shape == (2, 8) and found["labels"].shape == (2, 7)
    assert found["other"] is given["other"] and found["name"] == "kept"
    assert (found["tokens"][:, 6:] == 0).all() and (found["labels"][:, 5:] == -100).all()
    assert torch.equal(found["tokens"][:, :6], given["tokens"])
    exact = batch(8)
    assert BUCKETS.padded(exact) is exact
    mask = gc.Buckets((3,), {"mask": gc.Pad(0, value=True)}).padded({"mask": torch.zeros(1, dtype=torch.bool)})
    assert mask["mask"].tolist() == [False, True, True]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (batch(17), "longer than the largest bucket: field 'tokens'"),
        ((torch.ones(2, 3),), "names fields, and a microbatch has none"),
        ({"tokens": [1, 2]}, "field 'tokens' cannot be padded"),
        ({"tokens": torch.ones(3)}, "field 'tokens' cannot be padded"),
        ({"labels": torch.ones(2, 3, dtype=torch.uint8)}, "field 'labels' cannot hold the value"),
    ],
)
def test_what_has_no_bucket_is_refused(given: Any, says: str) -> None:
    step = gc.compile_train_step(Recurrent(), loss_fn, plan=gc.Plan(backend="eager", buckets=BUCKETS, quiet=True))
    with pytest.raises(BatchError, match=says) as caught:
        step([batch(3), given])
    assert "in microbatch 1" in caught.value.__notes__
    assert step.stats.steps == 0


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: gc.Buckets((8, 4), {"x": gc.Pad(0)}), "rising whole numbers"),
        (lambda: gc.Buckets((), {"x": gc.Pad(0)}), "rising whole numbers"),
        (lambda: gc.Buckets((8,), {}), "says how each field is padded"),
        (lambda: gc.Buckets((8,), {"x": 1}), "says how each field is padded"),
        (lambda: gc.Pad(1.5), "whole number"),
        (lambda: gc.Pad(1, "a"), "is a number"),
        (lambda: gc.Plan(buckets=(8, 16)), "graphcomp.Buckets or None"),
    ],
)
def test_wrong_declarations_are_refused_when_they_are_made(make: Any, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        make()
