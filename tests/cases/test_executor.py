"""The eager backend is eager PyTorch: bitwise, step by step, and in no more memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphcomp import Plan, TokenLoss, compile_train_step, token_loss
from tests.cases.live import LiveBytes
from tests.cases.tiny import divided, next_token, rows, tiny_gpt
from tests.zoo.gpt import TinyGPT


def compiled(model: nn.Module, loss_fn: Any) -> Any:
    return compile_train_step(model, loss_fn, plan=Plan(backend="eager", quiet=True))


def by_hand(model: nn.Module, microbatches: list[dict[str, Tensor]]) -> None:
    """A step as a careful user writes it: every value is deleted as soon as it is not needed."""
    tokens = sum((batch["labels"] != -100).sum() for batch in microbatches)
    for batch in microbatches:
        logits = model(batch["tokens"])
        loss = token_loss(logits, batch["labels"]).total / tokens
        del logits
        loss.backward()
        del loss


def test_five_steps_with_an_optimizer_are_bitwise_those_of_eager() -> None:
    model, eager = tiny_gpt(), tiny_gpt()
    step = compiled(model, next_token)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01) for each in (model, eager)]
    for number in range(5):
        microbatches = divided(rows(4, 8 + number, number), 2)
        step(microbatches)
        by_hand(eager, microbatches)
        for (name, one), other in zip(model.named_parameters(), eager.parameters(), strict=True):
            assert torch.equal(one.grad, other.grad), (number, name)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for (name, one), other in zip(model.named_parameters(), eager.parameters(), strict=True):
        assert torch.equal(one, other), name


@pytest.mark.parametrize("microbatches", [1, 2, 3])
def test_a_step_needs_no_more_memory_than_eager_with_deletes(microbatches: int) -> None:
    model = tiny_gpt()
    given = divided(rows(5 * microbatches, 48), microbatches)
    known = [*model.parameters(), *model.buffers(), *(leaf for batch in given for leaf in batch.values())]
    step = compiled(model, next_token)
    step(given)
    model.zero_grad()
    with LiveBytes(known) as ours:
        step(given)
    model.zero_grad()
    with LiveBytes(known) as eager:
        by_hand(model, given)
    assert eager.peak > 1_000_000
    scalars = 4 * (microbatches + 4)  # the losses of all microbatches, the denominator and the scale
    # From the second microbatch on eager, too, has all sums while activations are at their most.
    sums = sum(p.numel() * 4 for p in model.parameters()) if microbatches == 1 else 0
    assert ours.peak <= eager.peak + scalars + sums


def squares(y: Tensor, batch: Tensor) -> TokenLoss:
    return TokenLoss(y.square().sum(), 1)


def test_where_parameters_outweigh_activations_there_is_one_set_of_gradients() -> None:
    """Each is added at once, as by autograd."""
    model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(8)))
    given = [torch.randn(2, 128) for _ in range(3)]
    known = [*model.parameters(), *given]
    step = compiled(model, squares)
    step(given)
    model.zero_grad()
    with LiveBytes(known) as ours:
        step(given)
    model.zero_grad()
    with LiveBytes(known) as eager:
        for x in given:
            loss = model(x).square().sum()
            loss.backward()
            del loss
    assert ours.peak <= eager.peak + 4 * (len(given) + 4)


def test_the_tracker_counts_what_lives_and_not_what_is_freed() -> None:
    x = torch.ones(1000)
    with LiveBytes([x]) as live:
        y = x + 1
        del y
        y = (x * 2).view(10, 100)
    assert live.peak == 4000
    with LiveBytes([x]) as live:
        y = x + 1
        z = y[:500] + 1
    assert live.peak == 4000 + 2000 and z.numel() == 500


class Wide(TinyGPT):
    """Keeps extra outputs, which nobody asked for."""

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        x = self.embed(tokens)
        kept = []
        for block in self.blocks:
            x = block(x)
            kept.append(x.repeat(1, 1, 8) ** 2)
        return {"logits": self.head(self.norm(x)), "kept": torch.stack(kept)}


def of_logits(output: dict[str, Tensor], batch: dict[str, Tensor]) -> TokenLoss:
    return token_loss(output["logits"], batch["labels"])


def test_outputs_that_nobody_asked_for_are_not_computed() -> None:
    model = tiny_gpt(Wide)
    step = compiled(model, of_logits)
    step([rows(2, 16)])
    plain = tiny_gpt()
    other = compiled(plain, next_token)
    other([rows(2, 16)])
    with LiveBytes() as wide:
        step([rows(2, 16)])
    with LiveBytes() as narrow:
        other([rows(2, 16)])
    assert wide.peak <= 1.05 * narrow.peak
