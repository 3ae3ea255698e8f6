"""Checkpointed regions and dropout: the forward's own mask in every layout, buffers once, less memory."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from graphcomp.ir import signature as role
from graphcomp.losses import TokenLoss
from graphcomp.partition.costs import size_bytes
from graphcomp.testing import VirtualStep
from tests.cases.live import LiveBytes
from tests.cases.tiny import LAYOUTS, assert_equal, dealt, divided, next_token, rows, step_of, tiny_gpt
from tests.zoo.gpt import TinyGPT

plainly: Callable[..., Any] = lambda function, *args: function(*args)  # noqa: E731
without_autograd = functools.partial(checkpoint, use_reentrant=False)
reentrant = functools.partial(checkpoint, use_reentrant=True)
without_state = functools.partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
RUNS = [plainly, without_autograd, reentrant, without_state]


class Masked(nn.Module):
    """h = dropout(x @ first @ second); run: how the dropped product is called."""

    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = (nn.Parameter(torch.randn(6, 6)) for _ in range(2))
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(lambda v: F.dropout(v @ self.second, 0.5), x @ self.first)


def squares(h: Tensor, batch: Any) -> TokenLoss:
    return TokenLoss(h.square().sum(), 1)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize(("stages", "schedule"), [one for one in LAYOUTS if one[0] <= 2])
def test_the_gradient_has_the_mask_of_the_forward(run: Callable[..., Any], stages: int, schedule: str) -> None:
    check_masks(run, stages=stages, schedule=schedule)


@pytest.mark.inductor
def test_compiled_the_gradient_has_the_mask_of_the_forward() -> None:
    check_masks(without_autograd, stages=1, backend="inductor")
    check_masks(without_autograd, stages=2, backend="inductor")


def check_masks(run: Callable[..., Any], **options: Any) -> None:
    model = Masked(run)
    step = step_of(model, squares, **options)
    given = [(torch.randn(n, 6),) for n in (3, 5, 4)]
    torch.manual_seed(7)
    ran = step.run(given, "all")
    first, second = torch.zeros(6, 6), torch.zeros(6, 6)
    for (x,), h in zip(given, ran.result.outputs, strict=True):
        upstream = 4 * h * (h != 0) / len(given)  # 2 of the square, 2 of the dropout; each counts one token
        second += (x @ model.first.detach()).T @ upstream
        first += x.T @ (upstream @ model.second.detach().T)
    torch.testing.assert_close(ran.gradients["second"], second)
    torch.testing.assert_close(ran.gradients["first"], first)
    torch.manual_seed(7)
    again = step.run(given, "all")
    assert all(torch.equal(one, other) for one, other in zip(ran.result.outputs, again.result.outputs, strict=True))
    assert all(torch.equal(ran.gradients[name], again.gradients[name]) for name in ran.gradients)


class Checkpointed(TinyGPT):
    """TinyGPT with dropout behind each block; run: how a block is called."""

    def __init__(self, run: Callable[..., Any] = plainly, blocks: int = 2) -> None:
        super().__init__(blocks=blocks)
        self.run = run

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = self.run(lambda v, block=block: F.dropout(block(v), 0.1), x)
        return self.head(self.norm(x))


def checkpointed(run: Callable[..., Any], blocks: int = 2) -> nn.Module:
    return tiny_gpt(lambda: Checkpointed(run, blocks))


@pytest.mark.parametrize(("stages", "data_ranks"), [(1, 1), (4, 1), (2, 2)])
def test_bits_are_those_without_checkpoints(stages: int, data_ranks: int) -> None:
    given: Any = divided(rows(), 4)
    given = [given[:2], given[2:]] if data_ranks == 2 else given
    found = []
    for run in (plainly, without_autograd):
        torch.manual_seed(3)
        found.append(step_of(checkpointed(run), next_token, stages, data_ranks=data_ranks).run(given))
    assert torch.equal(found[0].result.loss, found[1].result.loss)
    for name, gradient in found[0].gradients.items():
        assert torch.equal(gradient, found[1].gradients[name]), name


@pytest.mark.parametrize("run", [without_autograd, reentrant])
def test_one_stage_draws_what_eager_draws(run: Callable[..., Any]) -> None:
    model = checkpointed(run)
    given = divided(rows(), 2)
    assert_equal(model, next_token, given, step_of(model, next_token, 1))


def test_less_is_alive_at_once_also_where_forward_and_backward_are_one_program() -> None:
    peaks = []
    for run in (plainly, without_autograd):
        model = checkpointed(run, blocks=4)
        step = step_of(model, next_token, 1)
        batch = rows(4, 48)
        step.run([batch])
        with LiveBytes([*model.parameters(), *batch.values()]) as live:
            step.run([batch])
        peaks.append(live.peak)
    assert peaks[1] < 0.6 * peaks[0]


def kept_bytes(step: VirtualStep, stage: int) -> int:
    backward = step.latest[0].specialisation.partitions[False].stages[stage].backward
    assert backward is not None
    return sum(size_bytes(node) for what, node in backward.input_nodes() if isinstance(what, role.Saved))


class Normalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(checkpoint(lambda h: self.norm(h).relu(), self.first(x), use_reentrant=False))


@pytest.mark.parametrize(("stages", "data_ranks"), [(1, 1), (2, 1), (1, 2), (2, 3)])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_buffers_of_a_region_change_once_a_microbatch(stages: int, data_ranks: int, schedule: str) -> None:
    model, plain = Normalised(), Normalised()
    given = [torch.randn(n, 6) for n in (4, 3, 5)]
    step_of(model, squares, stages, schedule, data_ranks).run(dealt(given, data_ranks))
    for x in given:  # eager without a checkpoint; with one, eager would change them in the second run too
        plain.norm(plain.first(x))
    assert int(model.norm.num_batches_tracked) == 3
    torch.testing.assert_close(model.norm.running_mean, plain.norm.running_mean)
    torch.testing.assert_close(model.norm.running_var, plain.norm.running_var)


class InSegments(nn.Module):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 6)
        self.rest = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.2), nn.Tanh()) for _ in range(4)))
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint_sequential(self.rest, 2, self.first(x), use_reentrant=self.use_reentrant)


class Wrapped(nn.Module):
    def __init__(self, implementation: CheckpointImpl) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 6)
        self.block = checkpoint_wrapper(nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.2), nn.Tanh()), implementation)

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.first(x))


@pytest.mark.parametrize(
    "model",
    [
        functools.partial(InSegments, True),
        functools.partial(InSegments, False),
        functools.partial(Wrapped, CheckpointImpl.REENTRANT),
        functools.partial(Wrapped, CheckpointImpl.NO_REENTRANT),
    ],
)
def test_other_ways_to_checkpoint(model: Callable[[], nn.Module]) -> None:
    net = model()
    step = step_of(net, squares, 1)
    assert_equal(net, squares, [torch.randn(n, 6) for n in (4, 3)], step)
    program = step.latest[0].specialisation.partitions[False].stages[0].fused
    assert any(node.name.endswith("_again") for node in program.calls())


def test_hugging_face_gradient_checkpointing() -> None:
    transformers = pytest.importorskip("transformers")

    def llama() -> nn.Module:
        config = transformers.LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4
        )
        return transformers.LlamaForCausalLM(config)

    tokens = torch.randint(64, (2, 12))
    batch = {"input_ids": tokens, "labels": tokens, "use_cache": False}
    plain, model = tiny_gpt(llama), tiny_gpt(llama)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    steps = [step_of(one, None, 2) for one in (plain, model)]
    found = [step.run([batch]) for step in steps]
    for name, gradient in found[0].gradients.items():
        assert torch.equal(gradient, found[1].gradients[name]), name
    assert kept_bytes(steps[1], 0) < kept_bytes(steps[0], 0) / 4
    assert_equal(model, None, [batch], steps[1])
