"""Values whose memory is not in order keep their meaning over cuts, in saved values, and in the batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from graphcomp import TokenLoss
from tests.cases.tiny import assert_equal, step_of, tiny_gpt


class Turned(nn.Module):
    """Hands a transposed, a sliced and a permuted value over the cut, and views them behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        h = torch.tanh(self.layers[0](x)).transpose(0, 1)
        parts = self.layers[1](h)[:, :, 2:]
        heads = h.reshape(length, rows, 2, 4).permute(1, 2, 0, 3)
        h = self.layers[2](h.transpose(0, 1).view(rows * length, width))
        h = torch.sigmoid(h) + heads.permute(0, 2, 1, 3).reshape(rows * length, width)
        h = self.layers[3](h).t().flatten(1).t()
        return h.view(rows, length, width)[..., 2:] * parts.transpose(0, 1)


class Saved(nn.Module):
    """What backward needs was made transposed; a compiled forward may lay it out as it likes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layers[0](x).permute(2, 0, 1)
        h = torch.tanh(h + h.mean(0)) * h.sigmoid()
        h = self.norm(h.permute(1, 2, 0)).exp().cumsum(1)
        return torch.bmm(self.layers[1](h), h.mT).softmax(-1).transpose(0, 1).square()


def total(y: Tensor, batch: Tensor) -> TokenLoss:
    return TokenLoss(y.square().sum(), y.numel())


def batches() -> list[Tensor]:
    """Dense, transposed, sliced and expanded ones, of several lengths."""
    return [
        torch.randn(2, 5, 8),
        torch.randn(7, 3, 8).transpose(0, 1),
        torch.randn(4, 9, 12)[::2, 1:5, 2:10],
        torch.randn(1, 6, 8).expand(3, -1, -1),
        torch.randn(8, 5, 2).permute(2, 1, 0),
    ]


SPLITS = {"whole": [], "one cut": ["layers.1"], "three cuts": ["layers.1", "layers.2", "layers.3"]}


# `Saved` has two layers only.
@pytest.mark.parametrize(("kind", "cut"), [*((Turned, cut) for cut in SPLITS), (Saved, "whole"), (Saved, "one cut")])
def test_any_memory_layout(kind: type[nn.Module], cut: str) -> None:
    model = tiny_gpt(kind)
    step = step_of(model, total, **({"split": SPLITS[cut]} if SPLITS[cut] else {}))
    assert_equal(model, total, batches(), step)
    for batch in batches():
        assert_equal(model, total, [batch], step)
    assert step.compiler.traces == 1


@pytest.mark.inductor
@pytest.mark.parametrize(("kind", "cut"), [(Turned, "three cuts"), (Saved, "one cut")])
def test_any_memory_layout_compiled(kind: type[nn.Module], cut: str) -> None:
    model = tiny_gpt(kind).double()  # what is left then is no rounding
    step = step_of(model, total, split=SPLITS[cut], backend="inductor", schedule="gpipe")
    given = [batch.double() for batch in batches()]
    assert_equal(model, total, given, step, 1e-9)
    for batch in given:  # one alone runs forward and backward of the last stage as one program
        assert_equal(model, total, [batch], step, 1e-9)
    assert step.compiler.traces == 1
