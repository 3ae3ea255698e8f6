"""Any value may cross any cut; what follows from the batch alone is computed again in its place."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from graphcomp import TokenLoss
from graphcomp.ir import signature as role
from tests.cases.tiny import SCHEDULES, assert_equal, next_token, rows, step_of, tiny_gpt
from tests.zoo import ZOO
from tests.zoo.gpt import TinyGPT

CUTS = {2: ["layers.2"], 4: ["layers.1", "layers.2", "layers.3"]}


def squared(y: Tensor, batch: object) -> TokenLoss:
    return TokenLoss(y.float().square().sum(), y.numel())


class RotaryLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(
        self, h: Tensor, positions: Tensor, mask: Tensor, table: tuple[Tensor, Tensor], heads: int
    ) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, Tensor], int]:
        cos, sin = table[0][positions], table[1][positions]
        h = torch.tanh(self.linear(h)) * cos + h.roll(1, -1) * sin
        return h.masked_fill(~mask[..., None], 0.0) / heads, positions, mask, table, heads


class Rotary(nn.Module):
    """Each layer hands on hidden states, position ids, a mask, a table of constants and a Python number."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(RotaryLayer() for _ in range(4))

    def forward(self, ids: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1]).expand(ids.shape)
        angles = torch.outer(torch.arange(32.0), torch.arange(8.0))
        state: Any = (self.embed(ids), positions, ids != 0, (angles.cos(), angles.sin()), 2)
        for layer in self.layers:
            state = layer(*state)
        return state[0]


@functools.cache
def rotary() -> nn.Module:
    return tiny_gpt(Rotary)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("stages", [2, 4])
def test_what_the_batch_gives_is_not_sent_and_one_gradient_comes_back(stages: int, schedule: str) -> None:
    step = step_of(rotary(), squared, schedule=schedule, split=CUTS[stages])
    assert_equal(rotary(), squared, [torch.randint(16, (2, length)) for length in (5, 9, 7)], step)
    cut = step.latest[0].specialisation.partitions[False]
    assert [len(b.values) for b in cut.backward_boundaries.values()] == [1] * (stages - 1)
    for boundary in cut.forward_boundaries.values():
        # The hidden states, and the table where computing it again would cost more than this tiny model itself.
        assert {value.dtype for value in boundary.values} == {torch.float32} and len(boundary.values) <= 3


class Mixture(nn.Module):
    """A tree of values of every rank and kind, made from parameters so that it has to cross."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.layers[0](x)
        tree = {
            "scalar": h.mean(),
            "vector": h.sum((0, 1)),
            "transposed": h.mT,
            "slice": h[:, 1:],
            "expanded": h.sum(0).expand(x.shape[0], -1, -1),
            "four": h[:, :, None, :] * h[:, None, :, :],
            "five": (h[:, :, None, None, :] + h[:, None, None, :, :]).permute(4, 0, 3, 1, 2),
            "order": h.argsort(-1),
            "positive": h > 0,
            "whole": (h * 10).to(torch.int32),
            "number": x.shape[1] * 3,
            "half": h.to(torch.bfloat16),
            "nested": [(h.unbind(-1)[2], {"double": h.double()})],
        }
        h = self.layers[1](h)
        h = h + tree["scalar"] + tree["vector"] + tree["transposed"].mT * tree["number"]
        h = h + tree["four"].sum(1) + tree["five"].sum((2, 3)).permute(1, 2, 0)
        h = self.layers[2](h)
        h = h.gather(-1, tree["order"]) * tree["positive"] + tree["whole"]
        h = h + nn.functional.pad(tree["slice"], (0, 0, 1, 0)) + tree["expanded"]
        h = self.layers[3](h.reshape(-1, 4)).view_as(h)
        nested, inner = tree["nested"][0]
        return h + tree["half"].float() + nested[..., None] + inner["double"].float()


@functools.cache
def mixture() -> nn.Module:
    return tiny_gpt(Mixture)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_a_tree_of_values_of_all_ranks_and_kinds(stages: int, schedule: str) -> None:
    options = {"split": CUTS[stages]} if stages > 1 else {}
    step = step_of(mixture(), squared, schedule=schedule, **options)
    assert_equal(mixture(), squared, [torch.randn(2, length, 4) for length in (3, 6, 5)], step)
    assert step.compiler.traces == 1


@dataclass
class Carrier:
    h: Tensor
    aux: dict[str, Tensor]
    cache: None


pytree.register_dataclass(Carrier)


class CarrierBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, given: Carrier) -> Carrier:
        h = given.h + torch.tanh(self.first(given.h))
        gate = torch.sigmoid(self.second(h))
        return Carrier(h * gate, {**given.aux, "gate": given.aux["gate"] + gate.mean()}, given.cache)


class CarrierModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(CarrierBlock() for _ in range(4))

    def forward(self, x: Tensor) -> Carrier:
        carrier = Carrier(x, {"gate": x.new_zeros(()), "given": x}, None)
        for layer in self.layers:
            carrier = layer(carrier)
        return carrier


def of_carrier(output: Carrier, batch: Tensor) -> TokenLoss:
    return TokenLoss((output.h * output.aux["given"]).square().sum() + output.aux["gate"], batch.numel())


@functools.cache
def carrier_model() -> nn.Module:
    return tiny_gpt(CarrierModel)


@pytest.mark.parametrize("split", [[], ["layers.2"], ["layers.1.second", "layers.2"], ["layers.3.second"]], ids=str)
def test_blocks_hand_on_dataclasses_and_outputs_keep_their_type(split: list[str]) -> None:
    model = carrier_model()
    step = step_of(model, of_carrier, **({"split": split} if split else {}))
    microbatches = [torch.randn(rows, 8) for rows in (3, 5)]
    ran, expected = assert_equal(model, of_carrier, microbatches, step, outputs="all")
    for found, wanted in zip(ran.result.outputs, expected.outputs, strict=True):
        assert type(found) is Carrier and found.cache is None
        torch.testing.assert_close(found.h, wanted.h)
        torch.testing.assert_close(found.aux, wanted.aux)
    assert type(model) is CarrierModel and not model.__dict__.keys() - nn.Module().__dict__.keys()


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", ["u_shape", "encoder_decoder"])
def test_a_value_that_skips_stages_is_sent_once_a_hop(name: str, schedule: str) -> None:
    case = ZOO[name]
    model = zoo_model(name)
    split = ["down.2", "up.0", "up.2"] if name == "u_shape" else ["encoder.1", "decoder.0", "decoder.1"]
    step = step_of(model, case.loss_fn, schedule=schedule, split=split)
    ran, _ = assert_equal(model, case.loss_fn, case.microbatches(3), step)
    cut = step.latest[0].specialisation.partitions[False]
    values = [[value.name for value in b.values] for b in cut.forward_boundaries.values()]
    if name == "u_shape":  # the hidden state, with the skips that are still to be used
        assert [len(set(names)) for names in values] == [2, 4, 2]
    else:  # then the encoder's output goes along with the decoder's hidden state
        assert [len(set(names)) for names in values] == [1, 2, 2]
    assert all(len(set(names)) == len(names) for names in values)
    boundaries = [*cut.forward_boundaries.values(), *cut.backward_boundaries.values()]
    shared = sum(2 for users in cut.parameter_stages.values() if len(users) > 1)
    assert ran.messages == 3 * sum(len(boundary.values) for boundary in boundaries) + shared


@functools.cache
def zoo_model(name: str) -> nn.Module:
    return ZOO[name].build(0)


class SharedTable(TinyGPT):
    """One non-persistent buffer on the root is read by every block."""

    def __init__(self) -> None:
        super().__init__(blocks=4)
        self.register_buffer("table", torch.randn(64, 32), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x + self.table[: tokens.shape[1]])
        return self.head(self.norm(x))


@functools.cache
def shared_table() -> nn.Module:
    return tiny_gpt(SharedTable)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_buffer_that_all_blocks_read_is_not_sent(schedule: str) -> None:
    model = shared_table()
    keys, table = list(model.state_dict()), model.table
    step = step_of(model, next_token, schedule=schedule, split=["blocks.1", "blocks.2", "blocks.3"])
    assert_equal(model, next_token, [rows(2, length) for length in (5, 9)], step)
    assert list(model.state_dict()) == keys and model.table is table
    cut = step.latest[0].specialisation.partitions[False]
    assert all(len(boundary.values) == 1 for boundary in cut.forward_boundaries.values())
    # What is added before a block runs in no module, at the end of the stage before.
    assert [role.Buffer("table") in stage.forward.inputs for stage in cut.stages] == [True, True, True, False]


class ReadsTheBatch(nn.Module):
    """The last layers read fields of the batch, some of which no other layer knows."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor, scale: Tensor, rows: Tensor, factor: int, names: list[str]) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = torch.tanh(layer(x)) * factor
            if names[number] == "gather":
                x = x[rows] + scale.cumsum(0)[:, None]
        return x


def loss_of_fields(y: Tensor, batch: dict[str, Any]) -> TokenLoss:
    return TokenLoss((y * batch["only_for_the_loss"]).square().sum(), batch["count"])


def test_batch_fields_reach_every_stage_and_unread_ones_cost_nothing() -> None:
    model = tiny_gpt(ReadsTheBatch)

    def batch(rows: int, unread: object) -> dict[str, Any]:
        return {
            "x": torch.randn(rows, 8),
            "scale": torch.randn(rows),
            "rows": torch.randperm(rows),
            "factor": 3,
            "names": ["", "gather", "", "gather"],
            "only_for_the_loss": torch.randn(rows, 1),
            "count": rows,
            "unread": unread,
        }

    step = step_of(model, loss_of_fields, split=CUTS[4])
    assert_equal(model, loss_of_fields, [batch(5, torch.ones(3)), batch(5, torch.ones(4, 7)[0])], step)
    assert step.compiler.traces == 1
    given = step.latest[0].specialisation.joint.program.inputs
    assert not any("unread" in str(what) for what in given)
    assert_equal(model, loss_of_fields, [batch(6, torch.ones(3))], step)  # another number: another program
    assert step.compiler.traces == 2
