"""Losses for Hugging Face models: unmodified models against eager fp64, token by token, and every refusal."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphcomp import Plan, huggingface
from graphcomp.errors import LossError
from graphcomp.huggingface import OwnLoss, causal_lm_loss, masked_lm_loss, seq2seq_lm_loss, summed
from graphcomp.testing import VirtualStep, run_virtual
from tests.zoo.hugging_face import gpt2, llama

transformers = pytest.importorskip("transformers")

Fields = dict[str, Any]
VOCAB, IGNORED = 48, -100
STAGES = pytest.mark.parametrize("stages", [1, 2])


def bert() -> nn.Module:
    sizes = {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=VOCAB, **sizes, **no_dropout))


def t5() -> nn.Module:
    sizes = {"d_model": 24, "d_kv": 12, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    config = transformers.T5Config(vocab_size=VOCAB, dropout_rate=0.0, decoder_start_token_id=0, **sizes)
    return transformers.T5ForConditionalGeneration(config)


def fields(rows: int, length: int, valid: int, **others: Any) -> Fields:
    """A microbatch with `valid` valid labels, at random places; the first label of each row is among the valid."""
    labels = torch.full((rows * length,), IGNORED)
    first = torch.arange(rows) * length
    rest = torch.randperm(rows * length)
    chosen = torch.cat([first, rest[~torch.isin(rest, first)]])[:valid]
    labels[chosen] = torch.randint(VOCAB, (valid,))
    ids = torch.randint(VOCAB, (rows, length))
    return {"input_ids": ids, "labels": labels.view(rows, length), **others}


def microbatches(**others: Any) -> list[Fields]:
    """Very unequal counts, none at all among them, and one whose only valid label is where a shift drops it."""
    sizes = [(2, 5, 9), (3, 7, 4), (3, 4, 0), (2, 3, 1), (2, 9, 17)]
    return [fields(*each, **others) for each in sizes]


def by_token(model: nn.Module, given: list[Fields], shift: bool) -> tuple[float, int, dict[str, Tensor]]:
    """(sum of token losses / tokens), the tokens and the gradients: eager, one token at a time."""
    losses = []
    for batch in given:
        logits = model(**{name: value for name, value in batch.items() if name != huggingface.COUNT}).logits
        for row, labels in zip(logits, batch["labels"].tolist(), strict=True):
            for place, label in enumerate(labels):
                if label == IGNORED or (shift and place == 0):
                    continue
                scores = row[place - 1] if shift else row[place]
                losses.append(scores.logsumexp(0) - scores[label])
    loss = torch.stack(losses).sum() / len(losses)
    trained = dict(model.named_parameters())
    found = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
    return float(loss.detach()), len(losses), {n: g for n, g in zip(trained, found, strict=True) if g is not None}


def assert_exact(model: nn.Module, loss_fn: Any, given: list[Fields], stages: int, shift: bool, close: float) -> None:
    """One step equals the fp64 definition in loss, count and every gradient."""
    expected, tokens, gradients = by_token(copy.deepcopy(model).double(), given, shift)
    result, found = run_virtual(model, loss_fn, given, plan=Plan(stages=stages, backend="eager", quiet=True))
    assert int(result.tokens["loss"]) == tokens
    assert float(result.loss) == pytest.approx(expected, rel=close)
    assert {name for name, gradient in found.items() if gradient is not None} == gradients.keys()
    for name, gradient in gradients.items():
        difference = (found[name].double() - gradient).abs().max()
        assert float(difference) <= close * max(1e-3, float(gradient.abs().max())), name


CASES: list[tuple[Callable[[], nn.Module], Any, bool]] = [
    (gpt2, causal_lm_loss, True),
    (llama, causal_lm_loss, True),
    (bert, masked_lm_loss, False),
    (t5, seq2seq_lm_loss, False),
]


@STAGES
@pytest.mark.parametrize(("make", "loss_fn", "shift"), CASES)
def test_the_loss_from_logits_is_the_sum_over_tokens_by_their_number(
    make: Callable[[], nn.Module], loss_fn: Any, shift: bool, stages: int
) -> None:
    assert_exact(make().double(), loss_fn, microbatches(), stages, shift, close=1e-9)


@STAGES
@pytest.mark.parametrize("make", [gpt2, llama])
def test_the_models_own_loss_is_the_same_number(make: Callable[[], nn.Module], stages: int) -> None:
    given = [summed(batch) for batch in microbatches()]
    assert_exact(make(), OwnLoss(shift=True), given, stages, shift=True, close=1e-5)


def test_the_own_loss_is_what_the_library_itself_gets_with_the_count_of_all_microbatches() -> None:
    model, given = gpt2(), microbatches()
    count = sum(int((batch["labels"][:, 1:] != IGNORED).sum()) for batch in given)
    expected = sum(float(model(**batch, num_items_in_batch=count).loss.detach()) for batch in given)
    result, _ = run_virtual(
        model, OwnLoss(shift=True), [summed(batch) for batch in given], plan=Plan(backend="eager", quiet=True)
    )
    assert float(result.loss) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    "loss_fn", [functools.partial(causal_lm_loss, label_smoothing=0.1), OwnLoss(shift=True)], ids=["logits", "own"]
)
def test_no_valid_label_at_all_is_exactly_zero(loss_fn: Any) -> None:
    step = VirtualStep(gpt2(), loss_fn, plan=Plan(stages=2, backend="eager", quiet=True))
    # A valid first label is not predicted by anything, so it counts for nothing.
    for given in ([fields(2, 5, 0), fields(3, 6, 0)], [fields(2, 5, 2)]):
        ran = step.run([summed(batch) for batch in given])
        assert float(ran.result.loss) == 0.0 and int(ran.result.tokens["loss"]) == 0
        assert not any(gradient.count_nonzero() for gradient in ran.gradients.values())
    assert step.compiler.traces == 1


def test_labels_that_are_shifted_already_are_counted_as_they_stand() -> None:
    model, plan = llama(), Plan(backend="eager", quiet=True)
    plain = [summed(batch) for batch in microbatches()]
    shifted = [
        batch | {"shift_labels": nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=IGNORED)} for batch in plain
    ]
    expected, gradients = run_virtual(model, OwnLoss(shift=True), plain, plan=plan)
    found, others = run_virtual(model, OwnLoss(shift=True), shifted, plan=plan)
    assert torch.equal(found.tokens["loss"], expected.tokens["loss"])
    torch.testing.assert_close(found.loss, expected.loss)
    torch.testing.assert_close(others, gradients)
    output = Output(logits=torch.randn(2, 9, VOCAB))
    one, other = causal_lm_loss(output, plain[-1]), causal_lm_loss(output, shifted[-1])
    assert int(one.tokens) == int(other.tokens)
    torch.testing.assert_close(one.total, other.total)


def test_options_of_the_cross_entropy_pass_through() -> None:
    batch = {"labels": torch.tensor([[3, 1, 7, 2]])}
    output = Output(logits=torch.randn(1, 4, 9))
    smoothed = causal_lm_loss(output, batch, ignore_index=7, label_smoothing=0.1)
    expected = nn.functional.cross_entropy(
        output.logits[0, [0, 2]], torch.tensor([1, 2]), reduction="sum", label_smoothing=0.1
    )
    assert torch.equal(smoothed.total, expected) and int(smoothed.tokens) == 2


@dataclass
class Output:
    logits: Any = None
    loss: Any = None
    aux_loss: Any = None


class Adds(nn.Module):
    """A model of one weight whose own loss is a sum by the count, with something done to it afterwards."""

    def __init__(self, then: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.then = then

    def forward(self, input_ids: Tensor, labels: Tensor, num_items_in_batch: Any = None) -> Output:
        loss = (self.weight * input_ids * (labels != IGNORED)).sum() / num_items_in_batch
        return Output(loss=self.then(loss, self.weight.square()))


def test_a_loss_with_nothing_added_is_accepted() -> None:
    given = [summed(fields(2, 5, 3)), summed(fields(2, 3, 1))]
    result, gradients = run_virtual(
        Adds(lambda loss, _: loss), OwnLoss(shift=False), given, plan=Plan(backend="eager", quiet=True)
    )
    expected = sum(int((batch["input_ids"] * (batch["labels"] != IGNORED)).sum()) for batch in given) / 4
    assert float(result.loss) == float(gradients["weight"]) == pytest.approx(expected)


@pytest.mark.parametrize("then", [torch.add, Tensor.add_, lambda loss, _: loss * 2])
def test_a_loss_with_something_else_in_it_is_refused(then: Callable[[Tensor, Tensor], Tensor]) -> None:
    with pytest.raises(LossError, match=r"own loss is not(.|\n)*another term(.|\n)*mean_loss"):
        run_virtual(Adds(then), OwnLoss(shift=False), [summed(fields(2, 5, 3))], plan=Plan(backend="eager"))


@pytest.mark.parametrize("make", [bert, t5])
def test_a_model_that_ignores_the_count_is_refused(make: Callable[[], nn.Module]) -> None:
    with pytest.raises(LossError, match=r"ignores num_items_in_batch(.|\n)*masked_lm_loss"):
        run_virtual(make(), OwnLoss(shift=False), [summed(fields(2, 5, 3))], plan=Plan(backend="eager"))


one = torch.ones((), requires_grad=True)
labels = torch.ones(2, 3, dtype=torch.int64)
REFUSED: list[tuple[Callable[[], object], str]] = [
    (lambda: causal_lm_loss((torch.zeros(2, 3, 7),), {"labels": labels}), "no logits(.|\n)*tuple"),
    (lambda: masked_lm_loss(Output(logits=torch.zeros(2, 3, 7)), {"input_ids": labels}), "no labels(.|\n)*input_ids"),
    (lambda: OwnLoss(shift=True)(Output(), {}), "brings no loss(.|\n)*NoneType"),
    (lambda: OwnLoss(shift=True)(Output(loss=one), {"labels": labels}), "got: None(.|\n)*summed"),
    (lambda: OwnLoss(shift=True)(Output(loss=one), {"num_items_in_batch": 6}), "got: 6(.|\n)*summed"),
    (lambda: OwnLoss(shift=True)(Output(loss=one / 1), summed({"labels": labels})), "own loss is not"),
    (lambda: OwnLoss(shift=True)(Output(loss=one / huggingface.One(1)), summed({})), "no labels"),
    (
        lambda: OwnLoss(shift=True)(Output(loss=one / huggingface.One(1), aux_loss=one), summed({})),
        "own loss is not",
    ),
]


@pytest.mark.parametrize(("wrong", "message"), REFUSED)
def test_refusals_say_what_was_expected_and_found(wrong: Callable[[], object], message: str) -> None:
    with pytest.raises(LossError, match=message):
        wrong()


def test_the_marking_one_is_one_in_every_operation() -> None:
    x, marking = torch.tensor([2.0, 3.0], requires_grad=True), huggingface.One(1)
    for operation in (torch.add, torch.mul, torch.div, torch.sub, torch.pow, torch.true_divide):
        assert torch.equal(operation(x, marking), operation(x, 1)), operation
    assert torch.equal(marking / x, 1 / x) and torch.equal(torch.full((2,), marking), torch.full((2,), 1))
    assert torch.equal(torch.div(x, other=marking), x)
    for unmarked in (x * marking, marking / x, x / 1, torch.div(x, marking, rounding_mode="floor")):
        assert not hasattr(unmarked, "graphcomp_sum")
    in_place = x * 1
    in_place /= marking
    assert hasattr(x / marking, "graphcomp_sum") and hasattr(in_place, "graphcomp_sum")
    assert summed({"a": x}) == {"a": x, "num_items_in_batch": 1}
