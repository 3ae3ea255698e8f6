"""Functions that operators take: what a program cannot hold is refused by name, at the user's line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from graphcomp.capture import capture
from graphcomp.errors import CaptureError
from graphcomp.ir.body import bodies_of
from graphcomp.losses import TokenLoss


class Model(nn.Module):
    def __init__(self, mix: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.gain = nn.Parameter(torch.ones(16))
        self.mix = mix

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(self, self.inner(x))


def loss_fn(output: Tensor, batch: Tensor) -> TokenLoss:
    return TokenLoss(output.sum(), batch.shape[0])


def refused(mix: Callable[[Any, Tensor], Tensor]) -> str:
    with pytest.raises(CaptureError) as caught:
        capture(Model(mix), loss_fn, torch.randn(3, 2, 5, 4))
    assert f"test_taken.py:{mix.__code__.co_firstlineno + 1}" in str(caught.value)
    return str(caught.value)


def conditional(model: Any, x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda y: y + 1, lambda y: y - 1, (x,))


def in_place(model: Any, x: Tensor) -> Tensor:
    return flex_attention(x, x, x, lambda s, b, h, i, j: s + torch.zeros_like(s).add_(i))


def drawn(model: Any, x: Tensor) -> Tensor:
    return flex_attention(x, x, x, lambda s, b, h, i, j: s * torch.rand_like(s))


def made(model: Any, x: Tensor) -> Tensor:
    return flex_attention(x, x, x, lambda s, b, h, i, j: s + torch.tensor([1.0, 2.0])[h])


def unindexed(model: Any, x: Tensor) -> Tensor:
    return flex_attention(x, x, x, lambda s, b, h, i, j: s * model.gain.sum())


def masked_by_a_parameter(model: Any, x: Tensor) -> Tensor:
    return flex_attention(x, x, x, None, create_block_mask(lambda b, h, i, j: model.gain[i] > 0, 1, 1, 5, 5, x.device))


def test_an_operator_that_nothing_is_known_of() -> None:
    message = refused(conditional)
    assert "the code calls 'cond', an operator that takes functions, which a program cannot hold" in message


@pytest.mark.parametrize(
    ("mix", "what", "remedy"),
    [
        (in_place, "one of whose functions works in place", "score = score + x"),
        (drawn, "one of whose functions draws random numbers", "draw outside of the function"),
        (made, "one of whose functions makes a tensor from numbers", "make it outside of the function"),
        (unindexed, "whose score uses a value that needs a gradient without indexing it", "or compute it before"),
        (masked_by_a_parameter, "whose mask reads a value that needs a gradient", "use it in score_mod"),
    ],
)
def test_functions_that_do_more_than_compute(mix: Any, what: str, remedy: str) -> None:
    message = refused(mix)
    assert f"the code calls 'flex_attention', an operator that takes functions, {what}" in message
    assert remedy in message


def operators(model: nn.Module) -> list[Any]:
    program = capture(model, loss_fn, torch.randn(3, 2, 5, 4)).program
    return [node for node in program.calls() if bodies_of(node)]


def test_values_from_outside_are_arguments_in_the_order_of_their_use() -> None:
    def mix(model: Any, x: Tensor) -> Tensor:
        size, table = x.shape[0], torch.arange(16) * 2
        return flex_attention(x, x, x, lambda s, b, h, i, j: s * model.gain[i] + table[j] / size)

    (forward, backward) = operators(Model(mix))
    for call in (forward, backward):
        *_, of_score, of_mask = call.args
        assert of_score[0].name == "gain" and len(of_score) == 3 and of_mask == ()
    assert [part is not None for part in backward.meta["val"][3]] == [True, False, False]


def test_the_functions_run_once_in_forward_whatever_their_variables_are_later() -> None:
    calls = []

    def mix(model: Any, x: Tensor) -> Tensor:
        power = 2

        def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            calls.append(power)
            return s + model.gain[i] * power

        y = flex_attention(x, x, x, score)
        power = 3
        return y

    _, backward = operators(Model(mix))
    assert set(calls) == {2}
    literals = [argument for body in bodies_of(backward) for call in body.calls for argument in call.args]
    assert 2 in literals and 3 not in literals
