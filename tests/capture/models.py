"""Small models and helpers that the tests of capture share."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor, nn

from graphcomp.losses import token_loss


class Net(nn.Module):
    """Embedding, one hidden layer, head; `scale` is a plain attribute."""

    def __init__(self, scale: float = 2.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.hidden = nn.Linear(8, 8)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(8, 16)
        self.scale = scale

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.drop(self.hidden(self.embed(tokens)).relu()) * self.scale)


def loss_fn(output: Tensor, batch: dict[str, Tensor]) -> Any:
    return token_loss(output, batch["labels"])


def batch(rows: int = 2, length: int = 5) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(rows * 100 + length)
    return {name: torch.randint(16, (rows, length), generator=generator) for name in ("tokens", "labels")}


class Everything:
    """All that a capture must leave alone, as copies, for comparison."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.names = list(model.state_dict())
        self.tensors = [*model.parameters(), *model.buffers()]
        self.values = [tensor.detach().clone() for tensor in self.tensors]
        self.gradients = [tensor.grad for tensor in self.tensors]
        self.attributes = [_attributes(module) for module in model.modules()]
        self.torch_stream = torch.get_rng_state()
        self.python_stream = random.getstate()
        self.gradient_mode = torch.is_grad_enabled()

    def check(self) -> None:
        model = self.model
        assert list(model.state_dict()) == self.names
        now = [*model.parameters(), *model.buffers()]
        assert [id(tensor) for tensor in now] == [id(tensor) for tensor in self.tensors]
        assert [type(tensor) for tensor in now] == [type(tensor) for tensor in self.tensors]
        for tensor, value, gradient in zip(now, self.values, self.gradients, strict=True):
            if tensor.device.type != "meta":
                assert torch.equal(tensor, value)
            assert tensor.grad is gradient
        assert [_attributes(module) for module in model.modules()] == self.attributes
        assert torch.equal(torch.get_rng_state(), self.torch_stream)
        assert random.getstate() == self.python_stream
        assert torch.is_grad_enabled() == self.gradient_mode


def _attributes(module: nn.Module) -> dict[str, Any]:
    """Attributes by identity, and what is in the tables of hooks, children, parameters."""
    return {
        name: (id(value), {key: id(item) for key, item in value.items()} if isinstance(value, dict) else None)
        for name, value in vars(module).items()
    }
