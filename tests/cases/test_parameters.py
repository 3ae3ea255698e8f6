"""Gradients land on the right names: tied, reused, frozen, unused and adapted parameters."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor, nn

from graphcomp import TokenLoss
from tests.cases.tiny import (
    LAYOUTS,
    PARAMETERS,
    assert_equal,
    dealt,
    divided,
    next_token,
    relative,
    rows,
    step_of,
    tiny_gpt,
)
from tests.zoo.gpt import Block, TinyGPT
from tests.zoo.reference import reference


class Tied(TinyGPT):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight


class FourTimes(TinyGPT):
    def __init__(self) -> None:
        super().__init__(blocks=1)
        self.blocks = nn.ModuleList([self.blocks[0]] * 4)


@pytest.mark.parametrize("kind", [Tied, FourTimes])
@pytest.mark.parametrize(
    ("stages", "data_ranks", "parameters"),
    [*((stages, 1, {}) for stages in (1, 2, 4)), *((stages, 2, one) for stages in (1, 2) for one in PARAMETERS)],
    ids=str,
)
def test_shared_parameters_are_trained_as_one(
    stages: int, data_ranks: int, parameters: dict, kind: type[nn.Module]
) -> None:
    model, eager = tiny_gpt(kind), tiny_gpt(kind)
    step = step_of(model, next_token, stages, data_ranks=data_ranks, **parameters)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01, eps=1e-3) for each in (model, eager)]
    for number in range(3):
        microbatches = divided(rows(8, seed=number), 4)
        ran = step.run(dealt(microbatches, data_ranks))
        expected = reference(eager, next_token, microbatches)
        assert relative(ran.result.loss, expected.loss) <= 1e-5
        for each, gradients in ((model, ran.gradients), (eager, expected.gradients)):
            for name, parameter in each.named_parameters():
                parameter.grad = gradients[name]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for (name, one), other in zip(model.named_parameters(), eager.parameters(), strict=True):
            assert relative(one, other) <= 1e-5, name
    assert step.compiler.traces == 1
    users = step.latest[0].specialisation.partitions[False].parameter_stages
    if stages > 1:
        assert any(len(stages) > 1 for stages in users.values())


class Unused(TinyGPT):
    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(4, 4)
        self.watched = nn.Linear(32, 32)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        x = x + self.watched(x).detach()
        return self.head(self.norm(x))


@pytest.mark.parametrize(
    ("stages", "data_ranks", "parameters"),
    [*((stages, 1, {}) for stages in (1, 2, 4)), *((stages, 2, one) for stages in (1, 2) for one in PARAMETERS)],
    ids=str,
)
def test_parameters_that_take_no_part_have_no_gradient(stages: int, data_ranks: int, parameters: dict) -> None:
    model = tiny_gpt(Unused)
    step = step_of(model, next_token, stages, data_ranks=data_ranks, **parameters)
    ran, _ = assert_equal(model, next_token, divided(rows(4), 2), step)
    for name in ("spare.weight", "watched.weight", "watched.bias", "positions.weight"):
        assert ran.gradients.get(name) is None


def freeze_all_but(model: nn.Module, *kept: str) -> nn.Module:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(kept))
    return model


SPLITS = {1: (), 2: ("blocks.1",), 4: ("blocks.0", "blocks.0.norm2", "blocks.1")}


def split_into(stages: int) -> dict:
    return {"split": SPLITS[stages]} if stages > 1 else {}


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("stages", [2, 4])
def test_below_the_lowest_trained_block_there_is_no_backward(stages: int, schedule: str) -> None:
    model = freeze_all_but(tiny_gpt(), "blocks.1")
    step = step_of(model, next_token, schedule=schedule, **split_into(stages))
    ran, _ = assert_equal(model, next_token, divided(rows(8), 4), step)
    cut = step.latest[0].specialisation.partitions[False]
    assert [stage.backward is None for stage in cut.stages] == [True] * (stages - 1) + [False]
    assert not cut.backward_boundaries
    assert ran.messages == 4 * (stages - 1)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("stages", [2, 4])
def test_a_gradient_flows_through_frozen_stages(stages: int, schedule: str) -> None:
    model = freeze_all_but(tiny_gpt(), "blocks.0")
    step = step_of(model, next_token, schedule=schedule, **split_into(stages))
    ran, _ = assert_equal(model, next_token, divided(rows(8), 4), step)
    assert all(name.startswith("blocks.0") for name in ran.gradients)


class Adapted(nn.Module):
    """A frozen linear layer with a low-rank part of its own beside it."""

    def __init__(self, frozen: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.frozen = frozen.requires_grad_(False)
        self.down = nn.Linear(frozen.in_features, rank, bias=False)
        self.up = nn.Linear(rank, frozen.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(x) + self.up(self.down(x))


def adapted() -> nn.Module:
    model = TinyGPT().requires_grad_(False)
    for block in model.blocks:
        block.attention.qkv = Adapted(block.attention.qkv)
        block.mlp[0] = Adapted(block.mlp[0])
    return model


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_only_adapters_are_trained(stages: int) -> None:
    model = tiny_gpt(adapted)
    ran, _ = assert_equal(model, next_token, divided(rows(8), 4), step_of(model, next_token, stages))
    assert len(ran.gradients) == len(model.blocks) * 2 * 2
    assert all(name.endswith(("up.weight", "down.weight")) for name in ran.gradients)


class Towers(nn.Module):
    """Two towers in nested containers, joined by functions of the root; one layer is in both."""

    def __init__(self) -> None:
        super().__init__()
        common = nn.Linear(8, 8)
        self.parts = nn.ModuleDict(
            {
                "left": nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh()), common]),
                "right": nn.Sequential(nn.ModuleDict({"in_": nn.Linear(8, 8)})["in_"], nn.GELU(), common),
            }
        )
        self.join = nn.Bilinear(8, 8, 8)

    def forward(self, x: Tensor) -> Tensor:
        left = x
        for part in self.parts["left"]:
            left = part(left) + x
        right = self.parts["right"](x)
        return torch.sigmoid(self.join(left, right)) * left + right


def squared(y: Tensor, batch: Tensor) -> TokenLoss:
    return TokenLoss(y.square().sum(), batch.shape[0])


@pytest.mark.parametrize(("stages", "schedule"), [*LAYOUTS, (3, "1f1b")])
def test_towers_and_nested_containers(stages: int, schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = towers()
    expected_keys = list(model.state_dict())

    def no_copies(*_: object, **__: object) -> object:
        raise AssertionError("the model was copied")

    microbatches = [torch.randn(rows, 8) for rows in (3, 5, 2)]
    expected = reference(model, squared, microbatches)
    step = step_of(model, squared, stages, schedule)
    with monkeypatch.context() as patch:
        patch.setattr(Towers, "__deepcopy__", no_copies, raising=False)
        ran = step.run(microbatches)
    for name, gradient in expected.gradients.items():
        assert relative(ran.gradients[name], gradient) <= 1e-5, name
    assert list(model.state_dict()) == expected_keys


@functools.cache
def towers() -> nn.Module:
    return tiny_gpt(Towers)


class Views(nn.Module):
    """Parameters used through views, broadcasts and slices, in more than one stage."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = nn.Parameter(torch.randn(4, 8, 8) / 3)
        self.shared = nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.stack:
            x = torch.tanh(x @ weight.t() + self.shared)
        return x @ self.stack.sum(0) + self.shared[None, :].expand_as(x)


@pytest.mark.parametrize(("stages", "schedule"), LAYOUTS)
def test_parts_of_one_parameter_on_several_stages(stages: int, schedule: str) -> None:
    model = views()
    step = step_of(model, squared, stages, schedule)
    assert_equal(model, squared, [torch.randn(rows, 8) for rows in (3, 5, 2)], step)


@functools.cache
def views() -> nn.Module:
    return tiny_gpt(Views)


def test_a_block_is_still_a_block() -> None:
    assert isinstance(tiny_gpt().blocks[0], Block)  # the models above are built from the same parts
