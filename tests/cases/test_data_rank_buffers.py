"""Buffers that several data ranks change: as in one process that goes through the data ranks one after the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphcomp as gc
from graphcomp.errors import StateError
from graphcomp.ir import meta
from graphcomp.ir.signature import BufferUpdate, Statistic
from graphcomp.testing import check_parity
from tests.cases.tiny import PARAMETERS, assert_equal, dealt, step_of, tiny_gpt
from tests.wide import diagonal
from tests.zoo import ZOO


def total(y: Tensor, batch: Any) -> gc.TokenLoss:
    return gc.TokenLoss(y.square().sum(), y.shape[0])


class Averages(nn.Module):
    """Norms, counters and moving averages of many forms; one buffer that two stages read; and one that is no more than
    the latest microbatch's."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6, momentum=0.3)
        self.instance = nn.InstanceNorm1d(3, affine=True, track_running_stats=True)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 6))
        self.register_buffer("seen", torch.tensor(2**40))
        self.register_buffer("mean", torch.randn(6))
        self.register_buffer("square", torch.rand(2, 3).t())
        self.register_buffer("latest", torch.zeros(6))
        self.register_buffer("largest", torch.tensor(False))
        self.register_buffer("history", torch.zeros(3, 6))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += x.shape[0]
        x = self.norm(self.first(x * self.scale)).relu()
        x = self.instance(x.view(-1, 3, 2)).flatten(1)
        self.mean.lerp_(x.detach().mean(0), 0.1)
        self.square = 0.5 * self.square + x.detach().view(-1, 3, 2).square().mean(0)
        self.history[1:] = self.history[:-1].clone()
        self.history[0] = self.mean
        x = self.last(x * self.scale)
        self.latest.copy_(x.detach()[-1])
        self.largest |= x.detach().amax() > 3
        return x


def batches(*lengths: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(length, 6, dtype=torch.float64, generator=draw) for length in lengths]


@pytest.mark.parametrize(("data_ranks", "stages", "options"), diagonal((2, 3), (1, 2), PARAMETERS[:2]))
def test_every_update_is_made_once_and_in_order(data_ranks: int, stages: int, options: dict[str, Any]) -> None:
    model = tiny_gpt(Averages).double()
    step = step_of(model, total, stages, data_ranks=data_ranks, **options)
    for _ in range(2):
        _, expected = assert_equal(model, total, batches(4, 3, 7, 2, 5), step, 1e-12)
        for name, buffer in model.named_buffers():
            torch.testing.assert_close(buffer, expected.buffers[name], rtol=1e-14, atol=1e-15)
    assert int(model.seen) == 2**40 + 2 * 21 and int(model.norm.num_batches_tracked) == 10


@pytest.mark.parametrize(("stages", "options"), [(1, PARAMETERS[0]), (2, PARAMETERS[1])])
def test_batch_norm_is_bitwise_that_of_one_process(stages: int, options: dict[str, Any]) -> None:
    case = ZOO["batch_norm"]
    model = case.build().double()
    step = step_of(model, case.loss_fn, stages, data_ranks=2, **options)
    given = case.microbatches(5, 0, torch.float64)
    for count in (1, 4):  # another number on each data rank
        expected = case.build().double()
        expected.load_state_dict(model.state_dict())
        step.run([given[:count], given[count:]])
        for batch in given:
            expected(batch[0])
        assert all(torch.equal(own, expected.get_buffer(name)) for name, own in model.named_buffers())


def test_what_stays_of_an_update_is_small_and_goes_with_the_step() -> None:
    model = tiny_gpt(Averages).double()
    step = step_of(model, total, 1, data_ranks=2)
    step.run(dealt(batches(400, 400), 2))
    stage = step.latest[0].specialisation.partitions[False].stages[0]
    kept = [node for what, node in stage.forward.output_items() if isinstance(what, Statistic)]
    sizes = {node.name: node.meta["val"].numel() for node in kept if meta.note(node).module != "instance"}
    assert sizes and max(sizes.values()) == 6, sizes
    assert any(node.target is torch.ops.aten.clone.default for node in kept)  # of one row, which is a view of all
    assert not [what for what in stage.forward.outputs if isinstance(what, BufferUpdate)]


def test_an_evaluation_changes_nothing_and_reads_what_was_trained() -> None:
    case = ZOO["batch_norm"]
    model = case.build().double()
    step = step_of(model, case.loss_fn, 2, data_ranks=2)
    given = case.microbatches(3, 0, torch.float64)
    step.run(dealt(given, 2))
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    found = step.evaluate(dealt(given, 2))
    assert all(torch.equal(before[name], buffer) for name, buffer in model.named_buffers())
    alone = gc.compile_train_step(model, case.loss_fn, plan=gc.Plan(backend="eager", quiet=True)).evaluate(given)
    torch.testing.assert_close(found.loss, alone.loss, rtol=1e-12, atol=0)


class Sometimes(nn.Module):
    """Counts the microbatches of kind "a" alone, in forward, also when it evaluates."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("order", torch.zeros(6))

    def forward(self, x: Tensor, kind: str) -> Tensor:
        x = self.layer(x)
        if kind != "b":
            self.seen += 1
            self.order = 2 * self.order + (x.detach().mean(0) if kind == "a" else 1.0)
        return x


@pytest.mark.parametrize("kinds", ["a|b", "b|a", "bb|b", "ba|ca", "ab|bc|a"])
def test_data_ranks_whose_microbatches_update_otherwise_or_not_at_all(kinds: str) -> None:
    model, expected = tiny_gpt(Sometimes).double(), tiny_gpt(Sometimes).double()
    lines = [
        [{"x": x, "kind": kind} for x, kind in zip(batches(3, 4), line, strict=False)] for line in kinds.split("|")
    ]
    step = step_of(model, total, data_ranks=len(lines))
    for _ in range(2):
        step.run(lines)
        for batch in (one for line in lines for one in line):
            expected(**batch)
    assert int(model.seen) == int(expected.seen)
    torch.testing.assert_close(model.order, expected.order, rtol=1e-14, atol=0)
    step.evaluate(lines)
    assert int(model.seen) == int(expected.seen)


def test_parity_over_data_ranks_compares_buffers() -> None:
    table = check_parity(
        tiny_gpt(Averages).double(),
        total,
        dealt(batches(4, 3, 5), 2),
        plan=gc.Plan(backend="eager", quiet=True),
        data_ranks=2,
    )
    rows = {row.name: row.relative for row in table if row.kind == "buffer"}
    assert set(rows) == {name for name, _ in Averages().named_buffers()} - {"scale", "instance.num_batches_tracked"}
    assert max(rows.values()) <= 1e-14


def test_a_step_that_fails_leaves_buffers_as_they_were() -> None:
    model = tiny_gpt(Averages)
    plan = {"check_finite": True}
    step = step_of(model, total, 2, data_ranks=2, **plan)
    good = [x.float() for x in batches(4, 3)]
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with pytest.raises(gc.errors.NonFiniteError):
        step.run([good, [good[0], good[1] * float("nan")]])
    assert all(torch.equal(before[name], buffer) for name, buffer in model.named_buffers())
    assert_equal(model, total, good, step)


class Reads(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: Tensor) -> Any:
        x = torch.tanh(self.first(x))
        if self.how == "before":
            x = x * self.mean.cos()
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        if self.how == "after":
            x = x - self.mean
        return (self.last(x), self.mean) if self.how == "returned" else self.last(x)


@pytest.mark.parametrize(("how", "line"), [("before", "x = x * self.mean.cos()"), ("after", "x = x - self.mean")])
def test_a_buffer_that_the_rest_of_the_model_reads_is_refused_with_that_line(how: str, line: str) -> None:
    model = tiny_gpt(lambda: Reads(how)).double()
    with pytest.raises(StateError, match="buffer 'mean' is changed in forward and read by it") as caught:
        step_of(model, total, data_ranks=2).run([batches(2), batches(3)])
    number = [text.strip() for text in Path(__file__).read_text().splitlines()].index(line) + 1
    assert f"test_data_rank_buffers.py:{number}" in str(caught.value)
    assert not model.mean.count_nonzero()
    assert_equal(model, total, batches(2, 3), step_of(model, total), 1e-12)


def test_a_buffer_among_outputs_is_refused_where_outputs_are_kept() -> None:
    model = tiny_gpt(lambda: Reads("returned")).double()
    loss = lambda y, batch: total(y[0], batch)  # noqa: E731
    step = step_of(model, loss, data_ranks=2)
    assert_equal(model, loss, batches(2, 3), step, 1e-12)
    with pytest.raises(StateError, match="buffer 'mean' is changed in forward and read by it"):
        step.run([batches(2), batches(3)], outputs="all")
