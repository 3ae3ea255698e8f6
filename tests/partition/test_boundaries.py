"""What crosses between stages: dtypes, views, skips, and what does not cross at all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graphcomp.ir import interp, meta
from graphcomp.ir import signature as role
from graphcomp.losses import TokenLoss, mean_loss, metric, token_loss
from tests.partition.running import (
    carried,
    check,
    inputs_of,
    joint_of,
    square_loss,
)
from tests.zoo import ZOO
from tests.zoo.gpt import TinyGPT


def rows(count: int = 3, width: int = 16) -> dict[str, Tensor]:
    return {"x": torch.randn(count, width)}


class Layers(nn.Module):
    """A chain of linear layers, `fc0`, `fc1`, ...; subclasses say what happens in between."""

    def __init__(self, count: int = 4, width: int = 16) -> None:
        super().__init__()
        for i in range(count):
            self.add_module(f"fc{i}", nn.Linear(width, width))

    def layer(self, number: int, x: Tensor) -> Tensor:
        return torch.tanh(self.get_submodule(f"fc{number}")(x))

    def forward(self, x: Tensor) -> Tensor:
        for i in range(len(list(self.children()))):
            x = self.layer(i, x)
        return x


def names(cut: Any, table: str, source: int) -> list[str]:
    return [value.name for value in getattr(cut, table)[source].values]


def dtypes(cut: Any, source: int) -> set[torch.dtype]:
    return {value.dtype for value in cut.forward_boundaries[source].values}


def test_a_gpt_crosses_with_one_activation_and_one_gradient() -> None:
    for name in ("gpt", "tied_gpt"):
        case = ZOO[name]
        for stages in (2, 3, 4):
            cut = check(case.build(), case.loss_fn, case.microbatches(2), stages)
            assert carried(cut) == ([1] * (stages - 1), [1] * (stages - 1))
            boundary = cut.forward_boundaries[0]
            assert (boundary.source, boundary.target) == (0, 1)
            assert [(v.dtype, v.device, len(v.shape)) for v in boundary.values] == [(torch.float32, "cpu", 3)]


def test_a_skip_is_relayed_once_a_hop_and_its_gradient_comes_back_the_same_way() -> None:
    case = ZOO["u_shape"]
    split = ["down.2", "up.0", "up.2"]
    cut = check(case.build(), case.loss_fn, case.microbatches(3), split=split)
    # The root adds a skip just before the layer that reads it, so on the stage before: at the last cut the sum for
    # up.2 and down.0 are left.
    assert carried(cut) == ([2, 4, 2], [2, 4, 2])
    assert len(set(names(cut, "forward_boundaries", 1))) == 4


def test_the_memory_of_an_encoder_reaches_each_decoder_block() -> None:
    case = ZOO["encoder_decoder"]
    split = ["encoder.1", "decoder.0", "decoder.1"]
    cut = check(case.build(), case.loss_fn, case.microbatches(3), split=split)
    forward, _ = carried(cut)
    assert forward == [1, 2, 2]  # the target's embedding runs before the first decoder block: it ends stage 1


class TwoTowers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = Layers(2), Layers(2)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.scale * self.left(x) @ self.right(y).T


@pytest.mark.parametrize("split", [["right"], ["left.fc1", "right"], ["left.fc1", "right", "right.fc1"]])
def test_two_towers(split: list[str]) -> None:
    def batch(n: int) -> dict[str, Tensor]:
        return {"x": torch.randn(n, 16), "y": torch.randn(n + 1, 16)}

    check(TwoTowers(), square_loss, [batch(3), batch(5)], split=split)


class RootResiduals(nn.Module):
    """A root that does residuals, masks and positions itself, in no module of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 16)
        self.mixers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.head = nn.Linear(16, 64)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        mask = torch.ones(length, length).tril()
        places = torch.arange(length)
        weights = mask / (1 + (places[:, None] - places).abs()) * (tokens != 0)[:, None, :]
        x = self.embed(tokens)
        for mixer in self.mixers:
            x = x + torch.relu(mixer(weights @ x))
        return self.head(x)


@pytest.mark.parametrize("stages", [2, 3, 4, 5])
def test_a_root_with_residuals_and_masks(stages: int) -> None:
    def batch(n: int, length: int) -> dict[str, Tensor]:
        shape = (n, length)
        return {"tokens": torch.randint(64, shape), "labels": torch.randint(64, shape)}

    def loss_fn(logits: Tensor, batch: dict[str, Tensor]) -> TokenLoss:
        return token_loss(logits, batch["labels"])

    cut = check(RootResiduals(), loss_fn, [batch(2, 7), batch(3, 11)], stages)
    assert all("tokens" not in n for b in cut.forward_boundaries.values() for n in [v.name for v in b.values])


class ManyDtypes(nn.Module):
    """Makes, on its first stage, values of several dtypes that depend on a parameter and are used on the last."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.table = nn.Embedding(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        best = h.argmax(-1)  # int64
        positive = h > 0  # bool
        level = h.detach().square().mean()  # 0-dim, no gradient
        total = h.sum()  # 0-dim, with a gradient
        half = h.detach().to(torch.bfloat16)
        h = self.middle(h)
        out = self.last(torch.where(positive, h, -h)) + self.table(best)
        return out * level + total + half.to(out.dtype)


def test_values_of_many_dtypes_cross_and_skip_a_stage() -> None:
    cut = check(ManyDtypes(), square_loss, [rows(3), rows(5)], split=["middle", "last"])
    assert dtypes(cut, 0) == {torch.float32, torch.int64, torch.bool, torch.bfloat16}
    assert dtypes(cut, 1) == {torch.float32, torch.int64, torch.bfloat16}
    assert any(value.shape == () for value in cut.forward_boundaries[1].values)
    # Gradients come back for the hidden values and the sum only.
    assert all(v.dtype == torch.float32 for b in cut.backward_boundaries.values() for v in b.values)


class Views(Layers):
    """Hands on a transposed view, a slice, an expanded row and both halves of one product."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(0, x)
        turned, part, row = h.t(), h[:, 2:10:2], h[:1].expand(3, -1)
        left, right = self.layer(1, h).chunk(2, dim=-1)
        y = self.layer(2, turned.t() + F.pad(part, (0, 12))) + row.sum(0)
        return self.layer(3, y) + torch.cat([right, left], dim=-1)


@pytest.mark.parametrize("split", [["fc2"], ["fc1", "fc3"], ["fc1", "fc2", "fc3"]])
def test_views_cross_and_arrive_dense(split: list[str]) -> None:
    cut = check(Views(), square_loss, [rows(3), rows(5)], split=split)
    for stage in cut.stages:
        for program in (stage.forward, stage.backward):
            for what, node in program.input_nodes() if program else ():
                if isinstance(what, role.Activation):
                    value = meta.tensor(node)
                    assert value is not None and value.is_contiguous(), node.name


class Turned(Layers):
    """The last stage flattens a transposed value without a copy, which only its strides allow."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(0, x).t()
        y = self.layer(2, self.layer(1, x))
        return self.layer(3, y) + h.t().view(-1).view(-1, 16)


def test_a_transposed_value_keeps_its_strides_and_is_sent_without_a_copy() -> None:
    model, batch = Turned(), rows(3)
    cut = check(model, square_loss, [batch, rows(5)], split=["fc1", "fc3"])
    sent = interp.run(cut.stages[0].forward, inputs_of(cut.joint, model, batch))
    assert all(v.is_contiguous() for what, v in sent.items() if isinstance(what, role.Activation))


class Skip(Layers):
    def forward(self, x: Tensor) -> Tensor:
        first = self.layer(0, x)
        x = first
        for i in range(1, 5):
            x = self.layer(i, x)
        return x + first


def test_a_value_skips_stages_forward_and_its_gradient_backward() -> None:
    cut = check(Skip(5), square_loss, [rows(3), rows(4)], split=["fc1", "fc2", "fc3", "fc4"])
    assert carried(cut) == ([1, 2, 2, 2], [1, 2, 2, 2])
    first = names(cut, "forward_boundaries", 0)[0]
    assert all(first in names(cut, "forward_boundaries", s) for s in range(4))


class Gate(Layers):
    """The last stage needs a value of the first, without gradient: it goes up, nothing comes back for it."""

    def forward(self, x: Tensor) -> Tensor:
        gate = torch.sigmoid(self.layer(0, x)).detach()
        return self.layer(3, self.layer(2, self.layer(1, x))) * gate


def test_a_detached_skip_has_no_gradient() -> None:
    cut = check(Gate(), square_loss, [rows(3), rows(4)], split=["fc1", "fc2", "fc3"])
    assert carried(cut) == ([1, 2, 2], [0, 1, 1])
    assert cut.stages[0].backward is None


class Twice(Layers):
    """The same layers run again; the stage of an operation is where it runs, not where its weight lives."""

    def forward(self, x: Tensor) -> Tensor:
        for i in (0, 1, 2, 0, 1, 2):
            x = self.layer(i, x)
        return x


@pytest.mark.parametrize("stages", [2, 3, 6])
def test_a_module_that_runs_twice_is_on_two_stages(stages: int) -> None:
    cut = check(Twice(3), square_loss, [rows(3), rows(4)], stages)
    assert carried(cut) == ([1] * (stages - 1), [1] * (stages - 1))
    if stages == 6:
        assert cut.parameter_stages["fc1.weight"] == (1, 4)


@pytest.mark.parametrize(("trainable", "backward"), [("fc3", [0, 0, 0, 1]), ("fc0", [1, 1, 1, 1])])
def test_only_one_layer_is_trained(trainable: str, backward: list[int]) -> None:
    model = Layers()
    model.requires_grad_(False)
    model.get_submodule(trainable).requires_grad_(True)
    cut = check(model, square_loss, [rows(3), rows(4)], split=["fc1", "fc2", "fc3"])
    assert [int(stage.backward is not None) for stage in cut.stages] == backward
    assert sorted(cut.backward_boundaries) == [s for s in range(1, 4) if backward[s - 1]]


class Adapter(nn.Module):
    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down, self.up = nn.Linear(16, 2, bias=False), nn.Linear(2, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.up(self.down(x))


def test_adapters_between_frozen_layers() -> None:
    model = nn.Sequential(*(Adapter(nn.Linear(16, 16)) for _ in range(4)))
    for stages in (2, 4):
        cut = check(model, square_loss, [(torch.randn(3, 16),), (torch.randn(4, 16),)], stages)
        assert carried(cut) == ([1] * (stages - 1), [1] * (stages - 1))
        grads = {r.name for s in cut.stages for r in s.backward.outputs if isinstance(r, role.Grad)}  # type: ignore[union-attr]
        assert len(grads) == 8 and all("layer" not in name for name in grads)


class Auxiliary(Layers):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        early = self.layer(0, x)
        return {"out": self.layer(3, self.layer(2, self.layer(1, early))), "early": early}


def auxiliary_loss(output: dict[str, Tensor], batch: Any) -> tuple[dict, dict]:
    losses = {"main": square_loss(output["out"], batch), "aux": mean_loss(output["early"].square().mean())}
    return losses, {"largest": metric(output["early"].max(), "max"), "rows": metric(output["out"].shape[0], "sum")}


def test_auxiliary_losses_and_metrics_of_an_early_stage() -> None:
    cut = check(Auxiliary(), auxiliary_loss, [rows(3), rows(4)], split=["fc1", "fc2", "fc3"])
    owner = {r: s.index for s in cut.stages for r in s.forward.outputs}
    assert owner[role.Loss("main")] == owner[role.Loss("aux")] == 3  # the loss function runs at the end


def test_no_tuple_and_no_number_crosses() -> None:
    model = TinyGPT(blocks=2)
    case = ZOO["gpt"]
    joint = joint_of(model, case.loss_fn, case.microbatches(1)[0])
    for stages in (2, 3, 5, 8, 12):
        cut = check(model, case.loss_fn, case.microbatches(1), stages, joint=joint)
        assert all(b.values for b in cut.forward_boundaries.values())


def test_a_cut_inside_a_block() -> None:
    case = ZOO["gpt"]
    cut = check(case.build(), case.loss_fn, case.microbatches(2), split=["blocks.0.mlp.2", "blocks.1.norm2"])
    assert carried(cut)[0] == [2, 1]  # the residual beside the wide value; the residual alone
    assert {v.shape[-1] for v in cut.forward_boundaries[0].values} == {32, 128}
