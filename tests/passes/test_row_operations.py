"""Head and loss in chunks: each kind of operation on rows, and each that is no operation on rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graphcomp.errors import CaptureError
from graphcomp.losses import TokenLoss, metric, token_loss
from tests.passes.running import assert_same, inputs
from tests.passes.test_chunk_loss import Head, batch, chunked, joint_of, plain


class ByColumns(Head):
    """The head's weight is (in, out), so that its gradient is a product with the rows on the right."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(self.head.weight.detach().t().clone())
        del self.head

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) @ self.weight


def squared(x: Tensor, given: dict[str, Tensor]) -> TokenLoss:
    return TokenLoss(x.square().sum(), given["labels"] != -100)


def in_pairs(logits: Tensor, given: dict[str, Tensor]) -> TokenLoss:
    """What is in a row takes another shape, and its dimensions are summed one by one."""
    pairs = logits.view(*logits.shape[:2], 2, 3)
    return squared(pairs.softmax(-1).square().sum(-1, keepdim=True) + pairs.amax(-2, keepdim=True), given)


def a_row_more(logits: Tensor, given: dict[str, Tensor]) -> TokenLoss:
    """Another dimension of rows, of one element; and a weight for each row."""
    return squared(logits.unsqueeze(1).tanh() * given["labels"].clamp(min=1)[:, None, :, None], given)


def taken_away(logits: Tensor, given: dict[str, Tensor]) -> TokenLoss:
    largest = logits.amax(-1, keepdim=True)
    return squared(largest.squeeze(-1) + (logits - largest).exp().sum(-1, keepdim=True).squeeze(-1), given)


def spread(logits: Tensor, given: dict[str, Tensor]) -> TokenLoss:
    return squared(logits.mean(-1, keepdim=True).expand(-1, -1, 5) * torch.arange(5), given)


def all_of_it(logits: Tensor, given: dict[str, Tensor]) -> TokenLoss:
    """A slice that leaves nothing out, from which another takes the last columns."""
    return squared(logits[:, 0:][..., 2:].sigmoid(), given)


def inner_selection(logits: Tensor, given: dict[str, Tensor]) -> TokenLoss:
    """Two selections of rows, one of what the other has left."""
    chosen = logits[:, 1:][:, :-1]
    return squared(chosen.log_softmax(-1) * given["labels"][:, 1:-1, None].clamp(min=1), given)


def by_scatter(logits: Tensor, given: dict[str, Tensor]) -> TokenLoss:
    chosen = torch.zeros_like(logits).scatter(-1, logits.argmax(-1, keepdim=True), 1.0)
    return squared(logits.softmax(-1) * (2 - chosen), given)


def weighted_by_hand(logits: Tensor, given: dict[str, Tensor]) -> TokenLoss:
    """Losses of each row with a weight of each class, and of each row."""
    flat, weight = given["labels"].clamp(min=0).flatten(), torch.arange(1, 7).double()
    each = F.cross_entropy(logits.flatten(0, 1), flat, weight=weight, reduction="none")
    return TokenLoss((each * flat).sum(), given["labels"] != -100)


def a_matrix_of_sums(logits: Tensor, given: dict[str, Tensor]) -> TokenLoss:
    """Products of rows with rows, which are sums over them; none has a gradient."""
    rows = logits.flatten(0, 1).detach()
    return plain(logits, given), {"trace": metric((rows.t() @ rows.tanh()).trace(), "sum")}


MEANINGS = [
    in_pairs,
    a_row_more,
    taken_away,
    spread,
    all_of_it,
    inner_selection,
    by_scatter,
    weighted_by_hand,
    a_matrix_of_sums,
]


@pytest.mark.parametrize(
    ("model", "loss_fn"), [*((Head, one) for one in MEANINGS), (ByColumns, plain), (ByColumns, in_pairs)]
)
def test_meaning(
    model: Callable[[], nn.Module], loss_fn: Callable[[Any, Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the program without chunks: sums are taken in another order, 1e-12 of the largest."""
    monkeypatch.setattr("tests.passes.test_chunk_loss.Head", model)
    joint, made = joint_of(loss_fn, (4, 6))
    other = chunked(joint.program, 3)
    for shape in ((4, 6), (2, 5), (5, 7)):
        assert_same(joint.program, other, inputs(joint, made, batch(*shape, seed=1)), rtol=1e-12)


def some_of_two(logits: Tensor, given: dict[str, Tensor]) -> TokenLoss:
    return squared(logits.sum(0), given)


def kept(logits: Tensor, given: dict[str, Tensor]) -> TokenLoss:
    return squared(logits.sum((0, 1), keepdim=True), given)


def mixed_up(logits: Tensor, given: dict[str, Tensor]) -> TokenLoss:
    return squared(logits.view(logits.shape[0], -1), given)


def turned(logits: Tensor, given: dict[str, Tensor]) -> TokenLoss:
    return squared(logits.transpose(0, 1).tanh(), given)


def columns_first(logits: Tensor, given: dict[str, Tensor]) -> TokenLoss:
    return squared(logits.flatten(0, 1).t().softmax(0), given)


def between_rows(logits: Tensor, given: dict[str, Tensor]) -> tuple[TokenLoss, dict]:
    rows = logits.flatten(0, 1).detach()
    return plain(logits, given), {"likeness": metric((rows @ rows.t()).sum(), "sum")}


def two_slices(logits: Tensor, given: dict[str, Tensor]) -> TokenLoss:
    return squared(logits[:, 1:].tanh(), given), {"first": metric(logits[:, :-1].detach().sum(), "sum")}


def next_to_each_other(logits: Tensor, given: dict[str, Tensor]) -> TokenLoss:
    return squared(logits[:, 1:] - logits[:, :-1], given)


def repeated(logits: Tensor, given: dict[str, Tensor]) -> TokenLoss:
    return squared(logits.unsqueeze(0).expand(2, -1, -1, -1).tanh(), given)


def noisy(logits: Tensor, given: dict[str, Tensor]) -> TokenLoss:
    return squared(logits * torch.rand_like(logits), given)


def divided_by_all(logits: Tensor, given: dict[str, Tensor]) -> TokenLoss:
    each = F.cross_entropy(logits.flatten(0, 1), given["labels"].flatten(), reduction="none")
    return TokenLoss((each / each.detach().sum()).sum(), 1)


class TakesOver(torch.autograd.Function):
    """The gradient of the first is the second, whatever comes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, other: Tensor) -> Tensor:
        ctx.save_for_backward(other)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.saved_tensors[0], None


def a_sum_as_gradient(logits: Tensor, given: dict[str, Tensor]) -> TokenLoss:
    loss = token_loss(logits, given["labels"])
    return TokenLoss(TakesOver.apply(loss.total, logits.detach().sum()), loss.tokens)


REFUSED = [
    (some_of_two, "it sums over some of the dimensions that make up the rows"),
    (kept, "it keeps several dimensions of rows that it has summed over"),
    (mixed_up, "it reshapes rows together with what is in them"),
    (turned, "it moves the dimensions of the rows"),
    (columns_first, "it takes rows as columns"),
    (between_rows, "it is a product that is not row by row"),
    (two_slices, "it selects other rows than another operation does"),
    (next_to_each_other, "it selects other rows than another operation does"),
    (repeated, "it repeats rows"),
    (noisy, "it draws random numbers, or talks to other ranks"),
    (divided_by_all, "which exists when all rows are through"),
    (a_sum_as_gradient, "it takes a sum over all rows"),
]


@pytest.mark.parametrize(("loss_fn", "reason"), REFUSED, ids=[one.__name__ for one, _ in REFUSED])
def test_what_is_no_operation_on_rows_is_refused(loss_fn: Callable[[Any, Any], Any], reason: str) -> None:
    joint, _ = joint_of(loss_fn, (4, 6))
    with pytest.raises(CaptureError, match="cannot be computed in chunks") as caught:
        chunked(joint.program, 2)
    assert reason in str(caught.value), str(caught.value)
