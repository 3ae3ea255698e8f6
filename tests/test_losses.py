"""Losses: numbers against a per-token loop in fp64, every form a loss function may return, every refusal."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from graphcomp.errors import LossError
from graphcomp.losses import (
    REDUCTIONS,
    MeanLoss,
    Metric,
    TokenLoss,
    from_output,
    mean_loss,
    metric,
    normalize,
    token_loss,
)


def by_hand(
    logits: Tensor, labels: Tensor, ignore: int = -100, smoothing: float = 0.0, weight: Tensor | None = None
) -> tuple[float, int]:
    """The definition, one token at a time, in fp64."""
    total, count = 0.0, 0
    rows = logits.double().reshape(-1, logits.shape[-1])
    for row, label in zip(rows, labels.reshape(-1).tolist(), strict=True):
        if label == ignore:
            continue
        log_p = row - row.logsumexp(0)
        w = torch.ones(len(row), dtype=torch.float64) if weight is None else weight.double()
        total += float(-(1 - smoothing) * w[label] * log_p[label] - smoothing / len(row) * (w * log_p).sum())
        count += 1
    return total, count


def example(*lead: int, classes: int = 7, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    labels = torch.randint(classes, lead)
    labels[torch.rand(lead) < 0.3] = -100
    return torch.randn(*lead, classes, dtype=dtype, requires_grad=True), labels


@pytest.mark.parametrize("lead", [(), (5,), (2, 5), (2, 3, 4), (0,), (2, 0), (0, 5)])
def test_a_token_loss_is_the_sum_and_the_count(lead: tuple[int, ...]) -> None:
    logits, labels = example(*lead)
    loss = token_loss(logits, labels)
    total, count = by_hand(logits.detach(), labels)
    assert math.isclose(loss.total.item(), total, rel_tol=1e-5, abs_tol=0.0)
    assert (loss.tokens.item(), loss.tokens.dtype, loss.tokens.shape) == (count, torch.int64, ())


@pytest.mark.parametrize("options", [{"smoothing": 0.1}, {"weight": torch.rand(7) + 0.5}, {"ignore": 3}])
def test_options_change_the_sum_as_cross_entropy_does(options: dict) -> None:
    logits, labels = example(4, 6)
    labels = labels.where(labels >= 0, 3) if "ignore" in options else labels
    theirs = {"smoothing": "label_smoothing", "weight": "weight", "ignore": "ignore_index"}
    loss = token_loss(logits, labels, **{theirs[name]: value for name, value in options.items()})
    total, count = by_hand(logits.detach(), labels, **options)
    assert math.isclose(loss.total.item(), total, rel_tol=1e-5)
    assert loss.tokens.item() == count


def test_smoothing_and_weight_together() -> None:
    logits, labels = example(4, 6, dtype=torch.float64)
    weight = torch.rand(7)
    loss = token_loss(logits, labels, label_smoothing=0.2, weight=weight)
    total, _ = by_hand(logits.detach(), labels, smoothing=0.2, weight=weight)
    assert math.isclose(loss.total.item(), total, rel_tol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_half_precision_is_computed_in_fp32_and_double_stays(dtype: torch.dtype) -> None:
    logits, labels = example(3, 40, dtype=dtype)
    loss = token_loss(logits, labels)
    assert loss.total.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    total, _ = by_hand(logits.detach(), labels)
    assert math.isclose(loss.total.item(), total, rel_tol=1e-12 if dtype == torch.float64 else 1e-5)
    loss.total.backward()
    assert logits.grad is not None and logits.grad.dtype == dtype


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}, {"weight": torch.ones(7)}])
@pytest.mark.parametrize("lead", [(2, 5), (0, 5)])
def test_nothing_valid_is_exactly_zero_with_zero_gradients(lead: tuple[int, ...], options: dict) -> None:
    logits = torch.randn(*lead, 7, requires_grad=True)
    loss = token_loss(logits, torch.full(lead, -100), **options)
    assert loss.total.item() == 0.0 and loss.tokens.item() == 0
    loss.total.backward()
    assert logits.grad is not None and torch.equal(logits.grad, torch.zeros_like(logits))


def test_int32_labels_and_a_view_as_logits() -> None:
    logits, labels = example(2, 5)
    shifted = token_loss(logits[:, :-1], labels[:, 1:].int())
    total, count = by_hand(logits.detach()[:, :-1], labels[:, 1:])
    assert math.isclose(shifted.total.item(), total, rel_tol=1e-5) and shifted.tokens.item() == count


def test_one_trace_serves_other_sizes_and_counts() -> None:
    def loss_fn(logits: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        named = {"a": token_loss(logits, labels), "b": TokenLoss(logits.sum(), labels.numel())}
        losses, metrics = normalize((named, {"rows": metric(labels.shape[0], "sum")}))
        return losses["a"].total, losses["a"].tokens, losses["b"].tokens, metrics["rows"].value

    traced = make_fx(loss_fn, tracing_mode="symbolic")(*(x.detach() for x in example(3, 5)))
    for lead in [(3, 5), (2, 9), (6, 4)]:
        logits, labels = (x.detach() for x in example(*lead))
        for got, expected in zip(traced(logits, labels), loss_fn(logits, labels), strict=True):
            assert torch.equal(got, expected) and got.dtype == expected.dtype


def scalar() -> Tensor:
    return torch.ones((), requires_grad=True) * 2


def test_forms_of_a_result() -> None:
    token = TokenLoss(scalar(), 3)
    for result, name, kind in [
        (token, "loss", TokenLoss),
        (mean_loss(scalar()), "loss", MeanLoss),
        (scalar(), "loss", MeanLoss),
        ({"lm": token}, "lm", TokenLoss),
        ({"z": scalar()}, "z", MeanLoss),
        ((token, {}), "loss", TokenLoss),
        (({"lm": token}, {}), "lm", TokenLoss),
    ]:
        losses, metrics = normalize(result)
        assert list(losses) == [name] and isinstance(losses[name], kind) and metrics == {}


def test_metrics_are_detached_scalars_with_a_reduction() -> None:
    loss = scalar()
    _, metrics = normalize((loss, {"plain": loss, "count": metric(7, "sum"), "top": Metric(torch.tensor(3), "max")}))
    assert {name: m.reduction for name, m in metrics.items()} == {
        "plain": "mean",
        "count": "sum",
        "top": "max",
    }
    assert not metrics["plain"].value.requires_grad
    assert torch.equal(metrics["count"].value, torch.tensor(7))


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_known_reductions(reduction: str) -> None:
    assert metric(scalar(), reduction).reduction == reduction


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (5, torch.tensor(5)),
        (0.25, torch.tensor(0.25, dtype=torch.float64)),
        (torch.tensor([True, False, True]), torch.tensor(2)),
        (torch.ones(2, 3, dtype=torch.int32), torch.tensor(6)),
        (torch.full((400,), 1.0, dtype=torch.bfloat16), torch.tensor(400.0)),
        (torch.zeros(0), torch.tensor(0.0)),
    ],
)
def test_tokens_become_one_number(tokens: Tensor | float, expected: Tensor) -> None:
    losses, _ = normalize(TokenLoss(scalar(), tokens))
    found = losses["loss"].tokens
    assert torch.equal(found, expected) and found.dtype == expected.dtype


def test_without_a_loss_function_the_output_brings_the_loss() -> None:
    token = TokenLoss(scalar(), 3)
    assert isinstance(from_output(SimpleNamespace(loss=token))[0]["loss"], TokenLoss)
    assert isinstance(from_output(SimpleNamespace(loss=scalar()))[0]["loss"], MeanLoss)
    with pytest.raises(LossError, match=r"brings no loss(.|\n)*no attribute `loss`(.|\n)*pass loss_fn"):
        from_output(torch.ones(3))
    with pytest.raises(LossError, match=r"its loss is None(.|\n)*labels"):
        from_output(SimpleNamespace(loss=None))


vector, weights = torch.ones(2, requires_grad=True), torch.ones(3, requires_grad=True)
logits, labels = torch.zeros(2, 3, 7), torch.zeros(2, 3, dtype=torch.int64)
REFUSED: list[tuple[Callable[[], object], str]] = [
    (lambda: normalize(None), "no loss(.|\n)*got: None(.|\n)*return"),
    (lambda: normalize(1.5), "no loss(.|\n)*float 1.5"),
    (lambda: normalize({}), "a dict without any loss"),
    (lambda: normalize((scalar(), {}, 3)), "a tuple of 3"),
    (lambda: normalize((scalar(), scalar())), "dict of metrics by name"),
    (lambda: normalize(vector), r"must be a scalar(.|\n)*shape \(2,\)"),
    (lambda: normalize({3: scalar()}), "non-empty string(.|\n)*got: 3"),
    (lambda: normalize({"acc": metric(scalar())}), "loss 'acc' is a metric"),
    (lambda: normalize({"acc": "high"}), "loss 'acc': str 'high'"),
    (lambda: normalize((scalar(), {"x": TokenLoss(scalar(), 1)})), "metric 'x' is a loss"),
    (lambda: normalize((scalar(), {"x": vector})), "metric must be a real scalar(.|\n)*reduce it"),
    (lambda: normalize((scalar(), {"x": None})), "metric must be a real scalar"),
    (lambda: metric(scalar(), "median"), "unknown reduction(.|\n)*sum, mean, max, min, last(.|\n)*'median'"),
    (lambda: mean_loss(vector), "must be a scalar"),
    (lambda: mean_loss(torch.tensor(3)), "floating-point tensor(.|\n)*int64"),
    (lambda: TokenLoss(3.0, 1), "must be a scalar(.|\n)*float 3.0"),
    (lambda: TokenLoss(scalar(), -1), "not be negative"),
    (lambda: TokenLoss(scalar(), math.nan), "not be negative"),
    (lambda: TokenLoss(scalar(), weights), "depend on parameters"),
    (lambda: TokenLoss(scalar(), "many"), "must be a count"),
    (lambda: TokenLoss(scalar(), True), "must be a count"),
    (lambda: TokenLoss(scalar(), torch.zeros(1, dtype=torch.complex64)), "must be real"),
    (
        lambda: token_loss(logits, labels, reduction="mean"),
        "no option 'reduction'(.|\n)*label_smoothing, weight",
    ),
    (lambda: token_loss(labels, labels), "needs logits"),
    (lambda: token_loss(logits, logits), "class numbers"),
    (lambda: token_loss(logits, labels[:, 1:]), r"do not fit(.|\n)*\(2, 3, 7\)(.|\n)*\(2, 2\)(.|\n)*shifted"),
    (lambda: token_loss(logits, labels.flatten()), "do not fit"),
]


@pytest.mark.parametrize(("wrong", "message"), REFUSED)
def test_refusals_say_what_was_expected_and_found(wrong: Callable[[], object], message: str) -> None:
    with pytest.raises(LossError, match=message):
        wrong()
