"""PyTorch's own attention layers with padded rows of any length: every number against eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

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


Score = Callable[..., Tensor]


class Scaled(nn.Module):
    """Queries, keys and values of `groups` heads out of one layer; attend: what is done with them."""

    def __init__(self, attend: Score, heads: int = 4, groups: int = 4) -> None:
        super().__init__()
        self.sizes = [heads * 4, groups * 4, groups * 4]
        self.project, self.out = nn.Linear(8, sum(self.sizes)), nn.Linear(heads * 4, 8)
        self.register_buffer("bias", torch.randn(16, 16), persistent=False)
        self.attend = attend

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        rows, length, _ = x.shape
        q, k, v = (part.view(rows, length, -1, 4).transpose(1, 2) for part in self.project(x).split(self.sizes, dim=-1))
        mixed = self.attend(q, k, v, padding, self.bias[:length, :length])
        return self.out(mixed.transpose(1, 2).reshape(rows, length, -1))


def causal(q: Tensor, k: Tensor, v: Tensor, padding: Tensor, bias: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def masked(q: Tensor, k: Tensor, v: Tensor, padding: Tensor, bias: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=~padding[:, None, None, :])


def biased(q: Tensor, k: Tensor, v: Tensor, padding: Tensor, bias: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=0.3)


def documents(q: Tensor, k: Tensor, v: Tensor, padding: Tensor, bias: Tensor) -> Tensor:
    document = padding.long().cumsum(1)
    same = document[:, None, :, None] == document[:, None, None, :]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=same & torch.ones_like(same).tril())


def by(*backends: SDPBackend) -> Score:
    def attend(q: Tensor, k: Tensor, v: Tensor, padding: Tensor, bias: Tensor) -> Tensor:
        with sdpa_kernel(list(backends)):
            return causal(q, k, v, padding, bias)

    return attend


def grouped(q: Tensor, k: Tensor, v: Tensor, padding: Tensor, bias: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


ATTENTIONS = [causal, masked, biased, documents, by(SDPBackend.MATH), by(SDPBackend.FLASH_ATTENTION), grouped]


@pytest.mark.parametrize(
    "attend", ATTENTIONS, ids=[*["causal", "masked", "biased", "documents", "math", "flash", "grouped"]]
)
def test_scaled_dot_product_attention(attend: Score) -> None:
    torch.manual_seed(0)
    model = Scaled(attend, groups=2 if attend is grouped else 4).double()
    batches = [(x.double(), padding) for x, padding in (padded(2, 5), padded(3, 7))]
    testing.check_parity(model, square, batches, plan=Plan(stages=2, backend="eager", quiet=True))


def test_kernels_chosen_around_the_step_are_followed() -> None:
    step = compile_train_step(Scaled(causal), square, plan=Plan(backend="eager", quiet=True))
    kernels = []
    for backend in (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH):
        with sdpa_kernel(backend):
            step([padded(2, 5)])
        kernels.append(step.stats.traces)
    assert kernels == [1, 2, 2]


@pytest.mark.parametrize("training", [True, False])
def test_encoder_layers(training: bool) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0 if training else 0.1, batch_first=True, norm_first=True)
    model = nn.Sequential(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(8, 8))
    model.train(training)  # in eval mode eager takes a fused path where it needs no gradient
    given = [padded(rows, length)[0] for rows, length in ((2, 5), (3, 7))]
    testing.check_parity(model, square, given, plan=Plan(stages=2, backend="eager", quiet=True))
