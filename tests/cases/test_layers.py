"""Layers of torch.nn whose lengths, state or kernels are unlike those of a linear layer."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from graphcomp import TokenLoss
from tests.cases.tiny import assert_equal, step_of


class Stack(nn.Module):
    """Layer after layer; of a result of several parts the first goes on."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            x = x[0] if isinstance(x, tuple) else x
        return x


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


def total(y: Tensor, batch: Tensor) -> TokenLoss:
    return TokenLoss(y.square().sum(), y.numel())


def floats(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.randn(shape) for shape in shapes]


SEQUENCES = ((3, 5, 8), (2, 7, 8))
LAYERS = {
    "convolutions and pooling": (
        lambda: [
            nn.Conv2d(3, 6, 3, padding=1),
            nn.BatchNorm2d(6),
            nn.MaxPool2d(2),
            nn.Conv2d(6, 4, 3),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(4, 2),
        ],
        floats((3, 3, 8, 10), (2, 3, 12, 9)),
    ),
    "a length that changes": (
        lambda: [nn.Upsample(scale_factor=2), nn.Conv1d(8, 8, 3), nn.ConvTranspose1d(8, 4, 2)],
        floats((3, 8, 5), (2, 8, 7)),
    ),
    "a length times a fraction": (
        lambda: [nn.Conv1d(8, 8, 1), nn.Upsample(scale_factor=1.5), nn.Conv1d(8, 8, 3), nn.Upsample(scale_factor=0.7)],
        floats((3, 8, 5), (2, 8, 7)),
    ),
    "bicubic after instance norm": (
        lambda: [nn.InstanceNorm2d(3, affine=True), nn.Upsample(scale_factor=2, mode="bicubic"), nn.Conv2d(3, 4, 1)],
        floats((3, 3, 4, 5), (2, 3, 6, 4)),
    ),
    "bags of embeddings": (
        lambda: [nn.EmbeddingBag(10, 8), nn.Linear(8, 8)],
        [torch.randint(10, (3, 4)), torch.randint(10, (5, 6))],
    ),
    "instance norm": (
        lambda: [nn.Conv1d(8, 8, 1), nn.InstanceNorm1d(8, affine=True, track_running_stats=True)],
        floats((3, 8, 5), (2, 8, 7)),
    ),
    "attention": (lambda: [SelfAttention(), nn.Linear(8, 8)], floats(*SEQUENCES)),
    "encoder layer": (
        lambda: [nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), nn.Linear(8, 8)],
        floats(*SEQUENCES),
    ),
    "weight norm": (
        lambda: [nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)), nn.Linear(8, 8)],
        floats(*SEQUENCES),
    ),
    "spectral norm": (
        lambda: [nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)), nn.Linear(8, 8)],
        floats(*SEQUENCES),
    ),
    "activations": (
        lambda: [nn.RMSNorm(8), nn.PReLU(), nn.Linear(8, 8), nn.Softplus(), nn.GroupNorm(1, 5)],
        floats((3, 5, 8), (2, 5, 8)),
    ),
}


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("name", LAYERS)
def test_one_program_for_all_lengths_equals_eager(name: str, stages: int) -> None:
    make, batches = LAYERS[name]
    model = Stack(*make())
    step = step_of(model, total, stages)
    assert_equal(model, total, batches, step)
    assert step.compiler.traces == 1


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU])
def test_recurrent_layers_need_a_program_for_each_length(layer: type[nn.RNNBase], stages: int) -> None:
    model = Stack(layer(8, 8, batch_first=True), nn.Linear(8, 8))
    step = step_of(model, total, stages)
    assert_equal(model, total, floats((3, 5, 8), (2, 7, 8), (4, 5, 8)), step)
    assert step.compiler.traces == 2  # time is a Python loop; the number of rows is free
    assert isinstance(model.layers[0]._flat_weights[0], nn.Parameter)
