"""Random batches: whatever structure, dtypes, sizes and plain values they have, a step equals eager, or says by name
what it refuses. Steps follow each other on one compiled step, so programs are reused for what they were not made from.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._pytree import register_dataclass

import graphcomp as gc
from graphcomp.errors import BatchError
from graphcomp.plan import SCHEDULES
from graphcomp.testing import VirtualStep
from tests.zoo.case import IGNORED
from tests.zoo.reference import reference

WIDTH, VOCAB = 4, 7


class Fields(NamedTuple):
    """What a batch may hold, in the order of a tuple batch. The loss reads `labels`."""

    x: Tensor
    labels: Tensor
    ids: Tensor | None = None
    mask: Tensor | None = None
    other: Tensor | None = None
    terms: Sequence[Tensor] = ()
    lengths: Sequence[int] = ()
    shift: int = 0
    flag: bool = False
    mode: str = "plain"
    scale: float = 1.0
    inner: Any = None


@dataclass
class Batch:
    """The same as a dataclass."""

    x: Tensor
    labels: Tensor
    ids: Tensor | None = None
    mask: Tensor | None = None
    other: Tensor | None = None
    terms: Sequence[Tensor] = ()
    lengths: Sequence[int] = ()
    shift: int = 0
    flag: bool = False
    mode: str = "plain"
    scale: float = 1.0
    inner: Any = None


register_dataclass(Batch, field_names=[each.name for each in fields(Batch)])


class Model(nn.Module):
    """Uses each of the fields, if it is there, on the way through four layers; decides in Python on plain values and
    on sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.embed = nn.Embedding(VOCAB, WIDTH)

    def use(self, batch: Fields | Batch) -> Tensor:
        x = batch.x.to(self.embed.weight.dtype)
        h = torch.tanh(self.layers[0](x))
        if batch.ids is not None:
            h = h + self.embed(batch.ids.long())
        h = torch.tanh(self.layers[1](h)) * batch.scale
        if batch.mask is not None:
            h = h.masked_fill(batch.mask.bool()[:, None], 0.5)
        for term in batch.terms:
            h = h + term.to(h.dtype).sum(0) / (term.shape[0] + 1)
        h = self.layers[2](h.roll(batch.shift, 0) if batch.shift else h)
        if batch.other is not None:
            # An equal size and one row are two other branches.
            other = batch.other.to(h.dtype)
            h = h * other if other.shape[0] in (1, h.shape[0]) else h + other.cumsum(0).sum(0)
        for start, length in enumerate(batch.lengths):
            h = h + start * h[:length].sum(0)
        if batch.mode == "sizes":
            h = h * h.shape[0] if h.shape[0] < 4 else h / h.shape[0]
        if batch.inner is not None:
            h = h + batch.inner["pair"][0].to(h.dtype)[..., None].sum() * batch.inner["pair"][1]
        h = torch.sigmoid(self.layers[3](h))
        return -h if batch.flag else h


class OfFields(Model):
    """Takes dicts and tuples."""

    def forward(self, x: Tensor, labels: Tensor, *others: Any, **more: Any) -> Tensor:
        return self.use(Fields(x, labels, *others, **more))


class OfOne(Model):
    def forward(self, batch: Any) -> Tensor:
        return self.use(batch["inside"][0] if isinstance(batch, list | dict) else batch)


class Nested(Model):
    """Takes {"inside": ...}."""

    def forward(self, inside: Any) -> Tensor:
        return self.use(inside[0])


def loss_fn(output: Tensor, batch: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    match batch:
        case {"inside": [inner, *_]}:
            labels = inner.labels
        case {"labels": labels}:
            pass
        case Batch() | Fields():
            labels = batch.labels
        case _:
            labels = batch[1]
    valid = labels != IGNORED
    losses = {
        "main": gc.TokenLoss((output.sum(-1).square() * valid).sum(), valid),
        "every": gc.TokenLoss(output.abs().sum(), output.shape[0]),
        "small": gc.mean_loss(0.1 * output.sum().tanh()),
    }
    return losses, {"rows": gc.metric(output.shape[0], "sum"), "seen": gc.metric(valid.sum(), "max")}


FORMS = {
    "dict": (OfFields, lambda f: f._asdict()),
    "dict of what is there": (OfFields, lambda f: {name: v for name, v in f._asdict().items() if v is not None}),
    "ordered": (OfFields, lambda f: OrderedDict(f._asdict())),
    "tuple": (OfFields, tuple),
    "named": (OfFields, lambda f: f),
    "dataclass": (OfOne, lambda f: Batch(**f._asdict())),
    "nested": (Nested, lambda f: {"inside": [Batch(**f._asdict()), {"unread": torch.ones(3)}]}),
}


@dataclass(frozen=True)
class Kind:
    """Everything of a microbatch but its sizes and numbers."""

    ids: torch.dtype | None
    mask: torch.dtype | None
    other: bool
    terms: int
    lengths: tuple[int, ...]
    shift: int
    flag: bool
    mode: str
    scale: float
    inner: bool
    x: torch.dtype


kinds = st.builds(
    Kind,
    ids=st.sampled_from([None, torch.int64, torch.int32, torch.uint8]),
    mask=st.sampled_from([None, torch.bool, torch.uint8]),
    other=st.booleans(),
    terms=st.integers(0, 2),
    lengths=st.sampled_from([(), (1,), (0, 2), (3, 1, 2)]),
    shift=st.integers(0, 2),
    flag=st.booleans(),
    mode=st.sampled_from(["plain", "sizes"]),
    scale=st.sampled_from([1.0, 0.5]),
    inner=st.booleans(),
    x=st.sampled_from([torch.float32, torch.float64, torch.float16]),
)
LAID = {
    "dense": lambda x: x.clone(),
    "a part": lambda x: torch.cat([x, x, x])[x.shape[0] : 2 * x.shape[0]],
    "a column": lambda x: torch.stack([x, x], x.dim())[..., 1],
    "every second": lambda x: x.repeat_interleave(2, 0)[::2],
    "turned": lambda x: x.mT.contiguous().mT if x.dim() > 1 else x.flip(0).flip(0),
}
"""The same values, as views of other memory."""


@dataclass(frozen=True)
class Shape:
    """What one microbatch has of its own. kind: which of two. Sizes are drawn apart, so they are equal now and then."""

    kind: int
    rows: int
    others: int
    terms: int
    laid: str


sizes = st.sampled_from([0, 1, 2, 3, 4, 7])
shapes = st.builds(Shape, st.integers(0, 1), sizes, sizes, sizes, st.sampled_from(sorted(LAID)))


def make(kind: Kind, shape: Shape, draw: torch.Generator) -> Fields:
    rows, others, terms = shape.rows, shape.others, shape.terms

    def normal(*shape_of: int) -> Tensor:
        return LAID[shape.laid](torch.randn(*shape_of, generator=draw).to(kind.x))

    def whole(high: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return LAID[shape.laid](torch.randint(high, (rows,), generator=draw).to(dtype))

    labels = whole(VOCAB)
    return Fields(
        x=normal(rows, WIDTH),
        labels=labels.masked_fill(labels < 2, IGNORED),
        ids=None if kind.ids is None else whole(VOCAB, kind.ids),
        mask=None if kind.mask is None else whole(2, kind.mask),
        other=normal(others, WIDTH) if kind.other else None,
        terms=[normal(terms + i, WIDTH) for i in range(kind.terms)],
        lengths=list(kind.lengths),
        shift=kind.shift,
        flag=kind.flag,
        mode=kind.mode,
        scale=kind.scale,
        inner={"pair": (normal(others), 2)} if kind.inner else None,
    )


def relative(found: Tensor, expected: Tensor) -> float:
    assert found.shape == expected.shape
    scale = float(expected.abs().max()) if expected.numel() else 0.0
    return float((found.double() - expected.double()).abs().max()) / (scale or 1.0) if expected.numel() else 0.0


def equals_eager(step: VirtualStep, lines: list[list[Any]]) -> None:
    every = [batch for line in lines for batch in line]
    expected = reference(step.model, loss_fn, every)
    ran = step.run(lines if len(lines) > 1 else lines[0])
    result = ran.result
    assert relative(result.loss, expected.loss) < 1e-9
    for name, loss in expected.losses.items():
        assert relative(result.losses[name], torch.as_tensor(loss)) < 1e-9, name
    for name, count in expected.tokens.items():
        assert int(result.tokens[name]) == count, name
    for name, value in expected.metrics.items():
        assert relative(result.metrics[name], value) < 1e-9, name
    for share, loss in zip(result.microbatch_losses, expected.microbatch_losses, strict=True):
        assert relative(share, loss) < 1e-9
    for name, gradient in expected.gradients.items():
        found = ran.gradients.get(name)
        assert (found is None) == (gradient is None), name
        assert gradient is None or relative(found, gradient) < 1e-9, name


@settings(max_examples=8)
@given(
    form=st.sampled_from(sorted(FORMS)),
    two=st.tuples(kinds, kinds),
    steps=st.lists(st.lists(shapes, min_size=1, max_size=5), min_size=2, max_size=3),
    stages=st.integers(1, 3),
    schedule=st.sampled_from(SCHEDULES),
    data_ranks=st.integers(1, 2),
)
def test_a_step_equals_eager(
    form: str,
    two: tuple[Kind, Kind],
    steps: list[list[Shape]],
    stages: int,
    schedule: str,
    data_ranks: int,
) -> None:
    made, wrap = FORMS[form]
    torch.manual_seed(0)
    model = made().double()
    plan = gc.Plan(stages=stages, schedule=schedule, backend="eager", max_programs=100, quiet=True)
    step = VirtualStep(model, loss_fn, plan=plan, data_ranks=data_ranks)
    draw = torch.Generator().manual_seed(1)
    for drawn in steps:
        batches = [wrap(make(two[each.kind], each, draw)) for each in drawn]
        cut = (len(batches) + 1) // 2 if data_ranks == 2 else len(batches)
        lines = [batches[:cut], batches[cut:]] if data_ranks == 2 else [batches]
        if not lines[-1]:
            lines[-1] = lines[0]
        equals_eager(step, lines)
    event(f"{step.compiler.traces} captures for {sum(map(len, steps))} microbatches")


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, odd: Any = None) -> Tensor:
        return self.second(self.first(x) * (2 if odd is None else 3))


def squares(output: Tensor, batch: dict[str, Any]) -> gc.TokenLoss:
    return gc.TokenLoss(output.square().sum(), output.shape[0])


class Table:
    """Compares by value, and so cannot be a key."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Table)

    __hash__ = None  # type: ignore[assignment]


REFUSED = {
    "array": (np.ones(3), "holds a ndarray"),
    "set": ({1, 2}, "holds a set"),
    "slice": (slice(0, 2), "holds a slice"),
    "object": (Table(), "holds a Table"),
    "sparse": (torch.eye(3).to_sparse(), "is not strided"),
    "gradient": (torch.ones(3, requires_grad=True), "requires a gradient"),
    "subclass": (torch.ones(3).as_subclass(type("Tagged", (Tensor,), {})), "a class of its own"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("place", [0, 1])
def test_what_cannot_be_served_is_refused_by_name(name: str, place: int) -> None:
    odd, text = REFUSED[name]
    step = VirtualStep(Odd(), squares, plan=gc.Plan(stages=2, backend="eager", quiet=True))
    good, bad = {"x": torch.ones(3, WIDTH), "odd": None}, {"x": torch.ones(2, WIDTH), "odd": {"deep": [odd]}}
    for _ in range(2):
        with pytest.raises(BatchError) as caught:
            step.run([bad, good] if place == 0 else [good, bad])
        assert text in str(caught.value) and "odd.deep[0]" in str(caught.value)
        assert f"in microbatch {place}" in getattr(caught.value, "__notes__", [])
    expected = reference(step.model, squares, [good])
    assert torch.equal(step.run([good]).gradients["first.weight"], expected.gradients["first.weight"])
