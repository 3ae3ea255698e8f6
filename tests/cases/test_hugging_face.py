"""Models of Hugging Face as they come: labels in the batch, their own loss, any length."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphcomp import token_loss
from tests.cases.tiny import assert_equal, step_of, tiny_gpt
from tests.zoo import hugging_face


def llama() -> nn.Module:
    return hugging_face.llama(64, 32, 48, heads=4, shared_heads=2)


def gpt2() -> nn.Module:
    return hugging_face.gpt2(64, 32, heads=4)


@pytest.fixture(scope="module", params=[gpt2, llama])
def model(request: pytest.FixtureRequest) -> nn.Module:
    return tiny_gpt(request.param)


def batch(rows: int, length: int) -> dict[str, Any]:
    tokens = torch.randint(64, (rows, length))
    labels = tokens.masked_fill(torch.rand(rows, length) < 0.3, -100)
    return {"input_ids": tokens, "labels": labels, "use_cache": False}


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_the_loss_of_the_model_itself_at_other_lengths(model: nn.Module, stages: int) -> None:
    step = step_of(model, None, stages)
    assert_equal(model, None, [batch(2, 7)], step)
    assert_equal(model, None, [batch(3, length) for length in (12, 5, 24)], step)
    assert step.compiler.traces == 1
    sizes = step.latest[0].specialisation.joint.sizes
    assert all(not isinstance(size, int) for shape in sizes.shapes.values() for size in shape)


def shifted(output: Any, batch: dict[str, Tensor]) -> Any:
    return token_loss(output.logits[:, :-1], batch["labels"][:, 1:])


@pytest.mark.parametrize("stages", [1, 2])
def test_a_token_loss_on_padded_rows(model: nn.Module, stages: int) -> None:
    step = step_of(model, shifted, stages)
    for lengths in ((9, 4), (3, 11), (16, 16)):
        given = batch(2, max(lengths))
        mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
        given["attention_mask"] = mask.long()
        given["labels"] = given["labels"].masked_fill(~mask, -100)
        assert_equal(model, shifted, [given], step)
    assert step.compiler.traces == 1
