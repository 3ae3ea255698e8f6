"""Structures as users write them: what a forward takes and returns, and parts that only some microbatches use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from graphcomp import TokenLoss
from tests.cases.tiny import assert_equal, step_of

WIDTH = 4


@dataclass
class Out:
    h: Tensor
    cache: None
    parts: list[Any]


pytree.register_dataclass(Out)


class Pair(NamedTuple):
    h: Tensor
    more: Any


RETURNS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "a tuple with None": lambda h, g: (h, None, g.detach()),
    "a dict of dicts": lambda h, g: {"h": h, "more": {"g": g, "empty": {}, "none": None}},
    "a named tuple": lambda h, g: Pair(h, [g, None, 3]),
    "a dataclass": lambda h, g: Out(h, None, [g > 0, "text"]),
    "the same tensor twice": lambda h, g: (h, h, [h[:, 0]]),
}


class Returns(nn.Module):
    def __init__(self, form: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.form = form
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        g = torch.tanh(self.first(x))
        return self.form(self.last(g), g)


def first_tensor(output: Any, batch: Any) -> TokenLoss:
    h = next(leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor))
    return TokenLoss(h.square().sum(), h.shape[0])


def doubles(*rows: int) -> list[Tensor]:
    return [torch.randn(number, WIDTH, dtype=torch.float64) for number in rows]


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("name", RETURNS)
def test_outputs_keep_their_structure(name: str, stages: int) -> None:
    model = Returns(RETURNS[name]).double()
    step = step_of(model, first_tensor, stages)
    ran, expected = assert_equal(model, first_tensor, doubles(3, 5), step, 1e-10, outputs="all")
    for found, wanted in zip(ran.result.outputs, expected.outputs, strict=True):
        (leaves, tree), (others, same) = pytree.tree_flatten(found), pytree.tree_flatten(wanted)
        assert tree == same
        for one, other in zip(leaves, others, strict=True):
            torch.testing.assert_close(one, other) if isinstance(other, Tensor) else None
            assert isinstance(other, Tensor) or one == other


class Takes(nn.Module):
    """Arguments by position and by name, nested, some of them left out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any, extra: Any = None, /, scale: Any = None, *, rest: Any = None) -> Tensor:
        x = x if isinstance(x, Tensor) else x["inner"][0]
        h = torch.tanh(self.first(x))
        if extra is not None:
            h = h + extra[0] * (1 if extra[1] is None else extra[1])
        return self.last(h) * (1 if scale is None else scale)


class ByName(Takes):
    def forward(self, x: Any, scale: Any = None, rest: Any = None, **more: Any) -> Tensor:  # type: ignore[override]
        h = super().forward(x, scale=scale)
        return h + sum(value.sum() for value in more.values() if isinstance(value, Tensor))


def batch_of(kind: str, rows: int) -> Any:
    (x,), (other,) = doubles(rows), doubles(rows)
    return {
        "one tensor": x,
        "a tuple": (x, (other, None)),
        "a nested tuple": ({"inner": [x, None]}, (other, 2.0)),
        "names": {"x": x, "scale": other},
        "nested names": {"x": {"inner": (x, "text")}, "rest": None, "bonus": other},
    }[kind]


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("kind", ["one tensor", "a tuple", "a nested tuple", "names", "nested names"])
def test_inputs_of_every_structure(kind: str, stages: int) -> None:
    model = (ByName() if "names" in kind else Takes()).double()
    assert_equal(
        model, first_tensor, [batch_of(kind, rows) for rows in (3, 5)], step_of(model, first_tensor, stages), 1e-10
    )


class Sometimes(nn.Module):
    """A branch that only some microbatches take, and a value that crosses only with it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.branch, self.never = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, bonus: Tensor | None = None, use: bool = False) -> Tensor:
        skipped = None
        for number, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            if number == 0 and bonus is not None:
                skipped = self.branch(bonus)
            if number == 2 and skipped is not None:
                x = x * skipped
        return x + self.never(x) if use else x


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_a_gradient_that_only_some_microbatches_have(stages: int, schedule: str) -> None:
    model = Sometimes().double()
    split = [f"layers.{number * 4 // stages}" for number in range(1, stages)]
    step = step_of(model, first_tensor, schedule=schedule, **({"split": split} if split else {}))
    plain, other, more, last = doubles(3, 5, 2, 4)
    given = [{"x": plain}, {"x": other, "bonus": doubles(5)[0]}, {"x": more}, {"x": last, "bonus": doubles(4)[0]}]
    ran, _ = assert_equal(model, first_tensor, given, step, 1e-10)
    assert step.compiler.traces == 2
    assert ran.gradients["branch.weight"].count_nonzero() and ran.gradients.get("never.weight") is None
    ran, _ = assert_equal(model, first_tensor, [{"x": plain}, {"x": more}], step, 1e-10)
    assert ran.gradients.get("branch.weight") is None


class Tables(nn.Module):
    """Every layer reads positions, a mask of documents from cumulative lengths, and a rotary table on the root."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in ("a", "b", "c", "d")})
        angles = torch.outer(torch.arange(32.0), torch.tensor([1.0, 0.1]))
        self.register_buffer("table", torch.cat([angles.cos(), angles.sin()], -1), persistent=False)
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        self.calls += 1
        places = torch.arange(x.shape[0])
        document = torch.searchsorted(ends, places, right=True)
        starts = torch.cat([ends.new_zeros(1), ends])[document]
        mask = (document[:, None] == document) & (places[:, None] >= places)
        for layer in self.layers.values():
            turned = layer(x) * self.table[places - starts]
            scores = (turned @ turned.mT).masked_fill(~mask, float("-inf"))
            x = x + scores.softmax(-1) @ turned
        return x


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_cumulative_lengths_and_tables_on_every_stage(stages: int) -> None:
    model = Tables().double()
    batches = [
        {"x": doubles(ends[-1])[0], "ends": torch.tensor(ends)} for ends in ([3, 7, 8], [2, 9], [1, 4, 6, 7, 11])
    ]
    step = step_of(model, first_tensor, stages)
    assert_equal(model, first_tensor, batches, step, 1e-10)
    assert step.compiler.traces == 1 and int(model.calls) == 3 and "table" not in model.state_dict()


def test_a_model_built_on_meta_has_the_program_of_a_real_one() -> None:
    with torch.device("meta"):
        empty = Sometimes()
    real = Sometimes()
    texts = []
    for model in (empty, real):
        step = step_of(model, first_tensor, 2)
        step.compiler.capture({"x": torch.randn(3, WIDTH)})
        texts.append(str(step.compiler.partition()))
    assert texts[0] == texts[1]


def test_outputs_of_the_librarys_own_type() -> None:
    outputs = pytest.importorskip("transformers.modeling_outputs")

    def form(h: Tensor, g: Tensor) -> Any:
        return outputs.CausalLMOutput(logits=h, hidden_states=(g, h), loss=None)

    model = Returns(form).double()
    step = step_of(model, lambda output, batch: first_tensor(output.logits, batch), 2)
    found = step.run(doubles(3), outputs="all").result.outputs[0]
    assert type(found) is outputs.CausalLMOutput and found.loss is None and found.attentions is None
    assert torch.equal(found.hidden_states[1], found.logits) and len(found.hidden_states) == 2
