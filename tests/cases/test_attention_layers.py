"""PyTorch's own attention layers with padded rows of any length: every number against eager."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphcomp import Plan, compile_train_step, testing


class Attention(nn.Module):
    """Asks for the attention weights, so that the layer adds its mask in a batched product."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.head = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 8)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        return self.head(self.attention(x, x, x, key_padding_mask=padding)[0])


def square(output: Tensor, batch: Any) -> Tensor:
    return output.square().mean()


def padded(rows: int, length: int) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, length, 8), torch.arange(length).repeat(rows, 1) >= length - 2


@pytest.mark.parametrize("stages", [1, 2])
def test_attention_with_weights_and_padding(stages: int) -> None:
    torch.manual_seed(0)
    batches = [padded(2, 5), padded(3, 7), padded(4, 4)]
    testing.check_parity(Attention(), square, batches, plan=Plan(stages=stages, backend="eager"))


def test_one_program_serves_all_lengths() -> None:
    step = compile_train_step(Attention(), square, plan=Plan(backend="eager", quiet=True))
    step([padded(2, 5), padded(3, 7), padded(4, 4)])
    assert step.stats.traces == 1


def test_a_padded_encoder_is_evaluated() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=True)
    x, padding = padded(2, 5)
    step = compile_train_step(model, square, plan=Plan(backend="eager", quiet=True))
    result = step.evaluate([{"src": x, "src_key_padding_mask": padding}])
    assert torch.backends.mha.get_fastpath_enabled()
    model.eval()
    expected = square(model(x, src_key_padding_mask=padding), None)
    torch.testing.assert_close(result.loss.float(), expected.detach())
