"""A model that prepares its own batches, data for it, and the trainer's four lines: one text for every plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import register_dataclass

import graphcomp as gc

VOCAB, IGNORED = 32, -100


@dataclass
class Tokens:
    ids: Tensor
    labels: Tensor


@dataclass
class Scored:
    loss: Any
    logits: Tensor


for kind in (Tokens, Scored):
    register_dataclass(kind)


class Speaker(nn.Module):
    """Two layers around a tanh. kind: of the loss, "token" or "scalar"."""

    def __init__(self, kind: str = "token", blocks: int = 2) -> None:
        super().__init__()
        self.kind = kind
        self.embed = nn.Embedding(VOCAB, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(blocks))
        self.head = nn.Linear(8, VOCAB)

    def prepare_batch(self, inputs: list[list[int]]) -> Tokens:
        """Padded to the longest; the label of a token is the next one."""
        length = max(map(len, inputs)) - 1
        ids, labels = torch.zeros(len(inputs), length, dtype=torch.int64), torch.full((len(inputs), length), IGNORED)
        for row, each in enumerate(inputs):
            ids[row, : len(each) - 1] = torch.tensor(each[:-1])
            labels[row, : len(each) - 1] = torch.tensor(each[1:])
        return Tokens(ids, labels)

    def forward(self, batch: Tokens) -> Scored:
        x = self.embed(batch.ids)
        for block in self.blocks:
            x = x + block(x).tanh()
        logits = self.head(x)
        loss: Any = gc.token_loss(logits, batch.labels)
        return Scored(loss.total if self.kind == "scalar" else loss, logits)


class Several(Speaker):
    """Its inputs are a step's; it makes microbatches of two rows of them."""

    def prepare_batch(self, inputs: list[list[int]]) -> Any:
        return [Speaker.prepare_batch(self, inputs[i : i + 2]) for i in range(0, len(inputs), 2)]


def built(kind: Callable[..., nn.Module] = Speaker, *arguments: Any) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return kind(*arguments).double()


def texts(number: int, seed: int = 0) -> list[list[int]]:
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, 9, (number,), generator=draw).tolist()
    return [torch.randint(VOCAB, (length,), generator=draw).tolist() for length in lengths]


def train(model: Any, parameters: Iterator[nn.Parameter], data: list[Any]) -> list[float]:
    """The four lines. model: compiled, or as it is."""
    optimizer = torch.optim.SGD(parameters, lr=0.5)
    losses = []
    for inputs in data:
        optimizer.zero_grad()
        batch = model.prepare_batch(inputs)
        out = model.forward(batch)
        out.loss.backward()
        optimizer.step()
        losses.append(float(out.loss.detach()))
    return losses
