"""The zoo and its oracle: the same every time, the right shapes, and numbers known from elsewhere."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from graphcomp.losses import TokenLoss, mean_loss, metric
from tests.zoo import ZOO
from tests.zoo.case import Case
from tests.zoo.reference import call, reference

EACH = pytest.mark.parametrize("case", ZOO.values(), ids=ZOO)


def shapes(batch: object) -> list[torch.Size]:
    return [leaf.shape for leaf in tree_leaves(batch)]


@EACH
def test_models_and_data_are_the_same_every_time(case: Case) -> None:
    first, second = case.build(3).state_dict(), case.build(3).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    for one, two in zip(case.microbatches(3, 1), case.microbatches(3, 1), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(tree_leaves(one), tree_leaves(two), strict=True))


@EACH
def test_sizes_differ_between_microbatches_exactly_if_ragged(case: Case) -> None:
    found = [shapes(batch) for batch in case.microbatches(5)]
    assert all(size > 1 for batch in found for shape in batch for size in shape)
    assert (found[0] != found[1]) == case.ragged


@EACH
def test_the_oracle_gives_every_result_and_leaves_the_model(case: Case) -> None:
    model, batches = case.build(0), case.microbatches(3)
    before = copy.deepcopy(model.state_dict())
    torch.manual_seed(1)
    found = reference(model, case.loss_fn, batches)
    torch.manual_seed(1)
    exact = reference(model, case.loss_fn, batches, dtype=torch.float64)
    after = model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(p.grad is None for p in model.parameters())
    assert torch.allclose(found.loss.double(), exact.loss, rtol=1e-5)
    for name, p in model.named_parameters():
        if p.requires_grad:
            one, two = found.gradients[name], exact.gradients[name]
            assert one is not None and two is not None, name
            assert (one.double() - two).norm() <= 1e-4 * two.norm() + 1e-7, name


@EACH
def test_a_random_case_depends_on_the_seed_and_the_others_do_not(case: Case) -> None:
    model, batches = case.build(0), case.microbatches(2)
    losses = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        losses.append(reference(model, case.loss_fn, batches).loss)
    assert (losses[0] != losses[1]) == case.random


@pytest.mark.parametrize("name", ["gpt", "tied_gpt"])
def test_microbatches_of_one_shape_equal_one_large_batch(name: str) -> None:
    case = ZOO[name]
    model, batches = case.build(0).double(), case.microbatches(4)
    found = reference(model, case.loss_fn, batches)
    logits = model(torch.cat([batch["tokens"] for batch in batches]))
    loss = F.cross_entropy(logits.flatten(0, 1), torch.cat([batch["labels"] for batch in batches]).flatten())
    loss.backward()
    assert torch.allclose(found.loss, loss, rtol=1e-12)
    for name, p in model.named_parameters():
        assert torch.allclose(found.gradients[name], p.grad, rtol=1e-9, atol=1e-14), name


class Weight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w, self.unused = nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.w * x


def test_very_unequal_counts_by_hand() -> None:
    def loss_fn(output: Tensor, batch: Tensor) -> tuple[TokenLoss, dict]:
        return TokenLoss(output.sum(), batch.numel()), {
            "top": metric(batch.max(), "max"),
            "plain": batch.mean(),
        }

    batches = [torch.tensor(values) for values in ([1.0, 1, 1, 1], [9.0], [2.0, 2], [5.0])]
    found = reference(Weight(), loss_fn, batches)
    assert found.gradients["w"] is not None and found.gradients["w"].item() == 2.75
    assert found.gradients["unused"] is None
    assert (found.loss.item(), found.tokens) == (2.75, {"loss": 8})
    assert [loss.item() for loss in found.microbatch_losses] == [0.5, 1.125, 0.5, 0.625]
    assert (found.metrics["top"].item(), found.metrics["plain"].item()) == (9.0, 4.25)


def test_no_token_at_all_and_a_mean_loss_beside_it() -> None:
    def loss_fn(output: Tensor, batch: Tensor) -> dict:
        return {
            "lm": TokenLoss((output * 0).sum(), (batch > 100).sum()),
            "size": mean_loss(output.square().mean()),
        }

    found = reference(Weight(), loss_fn, [torch.ones(2), torch.full((3,), 2.0)])
    assert (found.losses["lm"].item(), found.losses["size"].item(), found.tokens) == (0.0, 2.5, {"lm": 0})
    assert found.gradients["w"] is not None and found.gradients["w"].item() == 5.0


def test_buffers_take_every_microbatch_in_order() -> None:
    model = nn.BatchNorm1d(1, momentum=0.1)
    found = reference(model, lambda output, batch: output.sum(), [torch.full((2, 1), 0.0), torch.full((2, 1), 4.0)])
    assert torch.allclose(found.buffers["running_mean"], torch.tensor([0.4]))
    assert found.buffers["num_batches_tracked"].item() == 2


def test_how_a_batch_is_passed() -> None:
    class Takes(nn.Module):
        def forward(self, a: int, b: int = 0) -> tuple[int, int]:
            return a, b

    assert call(Takes(), {"a": 1, "c": 3}) == (1, 0)
    assert call(Takes(), (1, 2, 3)) == (1, 2)
    assert call(Takes(), 5) == (5, 0)
