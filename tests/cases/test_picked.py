"""Code whose numbers of rows depend on contents: picked by masks, routed to experts, counted, read out of tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import graphcomp as gc
from graphcomp.errors import CaptureError, GuardError, PartitionError
from graphcomp.inspect.explain import explain
from graphcomp.ir.pickling import from_bytes, to_bytes
from graphcomp.testing import HostSyncs
from tests.cases.tiny import assert_equal, step_of

WIDTH, EXPERTS, CLASSES = 4, 3, 11


class Model(nn.Module):
    """Two layers, what a test does with the rows between them, and a last layer."""

    def __init__(self, between: Callable[[Model, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.between = between
        self.first, self.again, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.between(self, self.first(x), x).tanh())


def masked(model: Model, h: Tensor, x: Tensor) -> Tensor:
    return model.again(h[h[:, 0] > 0])


def put_back(model: Model, h: Tensor, x: Tensor) -> Tensor:
    mask = h[:, 0] > 0
    found = torch.zeros_like(h)
    found[mask] = model.again(h[mask])
    return found.index_put((mask,), h[h[:, 0] > 0], accumulate=True)


def selected(model: Model, h: Tensor, x: Tensor) -> Tensor:
    return model.again(h) * h.masked_select(h > 0).square().sum()


def experts(model: Model, h: Tensor, x: Tensor) -> Tensor:
    """Expert 2 never gets a row."""
    chosen, mixed = h[:, :2].argmax(-1), torch.zeros_like(h)
    for number, expert in enumerate((model.again, model.first, model.last)):
        (rows,) = torch.where(F.one_hot(chosen, EXPERTS)[:, number] > 0)
        mixed.index_add_(0, rows, expert(h[rows]))
    return mixed


def by_runs(model: Model, h: Tensor, x: Tensor) -> Tensor:
    chosen = h[:, :2].argmax(-1)
    order = chosen.argsort(stable=True)
    lengths = [(chosen == number).sum() for number in range(EXPERTS)]
    runs = h[order].split(torch.stack(lengths).tolist())
    results = torch.cat([model.again(run) * (number + 1) for number, run in enumerate(runs)])
    return torch.empty_like(results).index_copy(0, order, results)


def by_ends(model: Model, h: Tensor, x: Tensor) -> Tensor:
    order = h[:, :2].argmax(-1).argsort(stable=True)
    begin, parts = 0, []
    for number in F.one_hot(h[:, :2].argmax(-1), EXPERTS).sum(0).tolist():
        parts.append(model.again(h[order][begin : begin + number]) * (len(parts) + 1))
        begin = begin + number
    return torch.empty_like(h).index_copy(0, order, torch.cat(parts))


def repeated(model: Model, h: Tensor, x: Tensor) -> Tensor:
    return model.again(h.repeat_interleave((h[:, 0] > 0).long() * 2, dim=0))


def different(model: Model, h: Tensor, x: Tensor) -> Tensor:
    values, places, counts = torch.unique((h[:, 0] * 2).long(), return_inverse=True, return_counts=True)
    runs, lengths = torch.unique_consecutive((h[:, 1] > 0).long(), return_counts=True)
    sums = torch.zeros(values.shape[0], WIDTH, dtype=h.dtype).index_add(0, places, h)
    return model.again(sums / counts[:, None]) * values[:, None] * (runs * lengths).sum()


def counted(model: Model, h: Tensor, x: Tensor) -> Tensor:
    chosen = (h[:, 0] > 0).long()
    return (
        model.again(h) * torch.bincount(chosen, minlength=WIDTH) * torch.bincount(chosen, weights=h[:, 1].detach())[0]
    )


def read(model: Model, h: Tensor, x: Tensor) -> Tensor:
    number = (h[:, 0] > 0).sum().item()
    return model.again(torch.cat([h[:number], torch.ones(number, WIDTH, dtype=h.dtype)])) / (number + 1)


def recomputed(model: Model, h: Tensor, x: Tensor) -> Tensor:
    return h + checkpoint(put_back, model, h, x, use_reentrant=False)


SYNCS = {masked: 1, put_back: 1, selected: 1, experts: 3, by_runs: 1, by_ends: 1, repeated: 1, different: 2, counted: 2,
         read: 1, recomputed: 1}  # fmt: skip


def total(y: Tensor, batch: Any) -> gc.TokenLoss:
    return gc.TokenLoss(y.square().sum(), 3)


def rows(sign: float, number: int) -> Tensor:
    """Rows of which, through `first`, all are picked, or none, or some."""
    x = torch.randn(number, WIDTH, dtype=torch.float64)
    return x if sign == 0 else x.abs() * sign


def model_of(between: Callable[[Model, Tensor, Tensor], Tensor]) -> Model:
    torch.manual_seed(4)
    model = Model(between).double()
    with torch.no_grad():
        model.first.weight.copy_(torch.eye(WIDTH))
        model.first.bias.zero_()
    return model


@pytest.mark.parametrize(
    ("between", "stages"),
    [(between, 1 + number % 2) for number, between in enumerate(SYNCS)],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_any_number_of_rows(between: Callable[[Model, Tensor, Tensor], Tensor], stages: int) -> None:
    """One program for all numbers of rows, none and one included; the host waits as often as a microbatch reads."""
    model, one = model_of(between), rows(-1, 5)
    one[2, 0] = 3
    batches = [rows(0, 7), rows(1, 4), rows(-1, 6), one]
    step = step_of(model, total, stages)
    assert_equal(model, total, batches, step, 1e-10)
    before = gc.collectives.host_syncs()
    with HostSyncs() as seen:
        step.run(batches)
    assert step.compiler.traces == 1
    assert gc.collectives.host_syncs() - before == sum(seen.found.values()) == SYNCS[between] * len(batches)


class Decoder(nn.Module):
    """Forgets padding where it begins; its layers see packed rows."""

    def __init__(self, unpads: bool) -> None:
        super().__init__()
        self.embed, self.unpads = nn.Embedding(CLASSES, WIDTH), unpads
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        h = self.embed(tokens)
        rows = h[mask.bool()] if self.unpads else h
        for layer in self.layers:
            rows = layer(rows).tanh()
        return self.head(torch.zeros_like(h).index_put((mask.bool(),), rows) if self.unpads else rows)


def valid_only(logits: Tensor, batch: dict[str, Tensor]) -> gc.TokenLoss:
    return gc.token_loss(logits[batch["labels"] != -100], batch["labels"][batch["labels"] != -100])


def plain_sum(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    mask = batch["labels"] != -100
    return F.cross_entropy(logits[mask], batch["labels"][mask], reduction="sum")


def token_rows(*valid: int) -> list[dict[str, Tensor]]:
    """A microbatch for each number of valid positions, of 2 rows of 5."""
    found = []
    for number in valid:
        tokens = torch.randint(CLASSES, (2, 5))
        mask = (torch.randperm(10) < number).view(2, 5)
        found.append({"tokens": tokens, "mask": mask.long(), "labels": tokens.where(mask, -100)})
    return found


BACKENDS = ["eager", pytest.param("inductor", marks=pytest.mark.inductor)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("loss", "unpads"), [(valid_only, False), (plain_sum, True), (valid_only, True)])
def test_valid_positions_only(loss: Any, unpads: bool, backend: str) -> None:
    """What follows from the batch alone is read before the step, once a microbatch; its rows cross cuts."""
    torch.manual_seed(5)
    model, batches = Decoder(unpads).double(), token_rows(6, 10, 0, 1)
    step = step_of(model, loss, split=["layers.1"], backend=backend)
    assert_equal(model, loss, batches, step, 1e-10)
    before = gc.collectives.host_syncs()
    with HostSyncs() as seen:
        step.run(batches)
    assert step.compiler.traces == 1
    reads = 2 if unpads else 1  # of the mask and of the labels
    assert gc.collectives.host_syncs() - before == sum(seen.found.values()) == reads * len(batches)
    cut = step.latest[0].specialisation.partitions[False]
    crossing = str(cut.forward_boundaries[0].values)
    assert cut.joint.before is not None and ("shape=(u" in crossing) == unpads


@pytest.mark.inductor
def test_compiled_over_stages() -> None:
    def both(model: Model, h: Tensor, x: Tensor) -> Tensor:
        return by_runs(model, put_back(model, h, x), x) + by_ends(model, h, x)

    model, batches = model_of(both), [rows(0, 7), rows(1, 4), rows(-1, 6)]
    step = step_of(model, total, split=["last"], backend="inductor")
    assert_equal(model, total, batches, step, 1e-10)
    assert step.compiler.traces == 1


class Given(Model):
    """What a test does with the rows has the whole batch."""

    def forward(self, **batch: Tensor) -> Tensor:
        return self.last(self.between(self, self.first(batch["x"]), batch).tanh())


def given_of(between: Any) -> Model:
    torch.manual_seed(4)
    return Given(between).double()


def at_places(number: int, values: int, picked: int) -> dict[str, Tensor]:
    """A batch of rows, some of which a mask of the batch picks, and so does the first column; and other rows."""
    mask = torch.randperm(number) < picked
    x = torch.randn(number, WIDTH, dtype=torch.float64)
    x[:, 0] = torch.where(mask, 1, -1)
    return {"x": x, "y": torch.randn(values, WIDTH, dtype=torch.float64), "mask": mask}


def put_by_batch(model: Model, h: Tensor, batch: dict[str, Tensor]) -> Tensor:
    h = h.clone()
    h[batch["mask"]] = batch["y"]
    return model.again(h)


def put_by_model(model: Model, h: Tensor, batch: dict[str, Tensor]) -> Tensor:
    h = h.clone()
    h[batch["x"][:, 0] * model.again.weight.square().sum().detach() > 0] = batch["y"]
    return model.again(h)


def added_up(model: Model, h: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return model.again(h.index_put((batch["mask"],), batch["y"], accumulate=True))


def put_in_a_slice(model: Model, h: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return model.again(h.slice_scatter(batch["y"], 0, 0, batch["mask"].sum().item()))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("between", [put_by_batch, put_by_model, added_up, put_in_a_slice])
def test_as_many_rows_are_put_as_are_picked(between: Any, backend: str) -> None:
    """Compiled code would read behind the end of what it is given."""
    model = given_of(between)
    step = step_of(model, total, backend=backend)
    assert_equal(model, total, [at_places(7, 3, 3), at_places(9, 5, 5)], step, 1e-10)
    for values, picked in ((3, 6), (5, 2)):
        with pytest.raises(GuardError, match="do not fit together") as caught:
            step.run([at_places(7, values, picked)])
        assert "test_picked.py:" in str(caught.value.where) and "y.shape[0]" in str(caught.value.expected)
    assert step.compiler.traces == 1


def test_as_many_rows_are_put_as_there_are_places() -> None:
    def put(model: Model, h: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return model.again(h.index_put((batch["y"].long(),), batch["x"]))

    batch = {"x": torch.randn(5, WIDTH, dtype=torch.float64), "y": torch.arange(5)}
    step = step_of(given_of(put), total)
    step.run([batch])
    with pytest.raises(RuntimeError, match="shape mismatch"):
        step.run([{**batch, "y": torch.arange(3)}])


ROUNDED = {
    "raw": (lambda b: b["score"][:, 0] > 0.5, True),
    "moved": (lambda b: torch.where(b["mask"], b["score"][:, 0].abs(), -1.0) > 0.5, True),
    "whole": (lambda b: b["mask"].long().cumsum(0) % 2 == 1, True),
    "cast": (lambda b: b["mask"].float() > 0.5, True),
    "largest": (lambda b: b["score"].argmax(-1) == 1, True),
    "summed": (lambda b: b["score"].sum(-1) > 0.5, False),
    "softmax": (lambda b: b["score"].softmax(-1)[:, 0] > 0.5, False),
    "short": (lambda b: b["score"][:, 0].bfloat16() > 0.1, False),
    "share": (lambda b: b["mask"].cumsum(0) / 3 > 1, False),
}


@pytest.mark.parametrize("name", ROUNDED)
def test_what_may_be_rounded_another_way_is_read_where_rows_are_picked(name: str) -> None:
    """What is exact is read before the step, and its rows cross cuts."""
    mask, exact = ROUNDED[name]
    model = given_of(lambda model, h, batch: model.again(h[mask(batch)]))
    batches = [{**at_places(n, 2, 3), "score": torch.randn(n, 3)} for n in (6, 8)]
    step = step_of(model, total)
    assert_equal(model, total, batches, step, 1e-10)
    assert (step.latest[0].specialisation.joint.before is not None) == exact
    apart = step_of(model, total, split=["last"])
    if exact:
        assert_equal(model, total, batches, apart, 1e-10)
    else:
        with pytest.raises(PartitionError, match="known at run time only") as caught:
            apart.run(batches)
        assert "compute it in the data loader" in str(caught.value)


@pytest.mark.inductor
def test_rows_are_those_that_were_counted() -> None:
    """Eager PyTorch and Inductor round these scores differently, about every second one."""

    def score(s: Tensor) -> Tensor:
        return (s * s.sin().exp()).sum(-1)

    def picked(model: Model, h: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return h[score(batch["score"]) > batch["least"]]

    scores = torch.randn(1000, 64)
    scores[-1] = -1.5
    x = torch.zeros(1000, WIDTH, dtype=torch.float64)
    x[-1] = 1  # never picked, but where a place is missing
    model, found = given_of(picked), score(scores)
    least = found[:20].nextafter(torch.tensor(-1e9))  # so that eager PyTorch just picks that row
    batches = [{"x": x, "score": scores, "least": one} for one in least]
    step = step_of(model, total, backend="inductor")
    losses = torch.stack(list(step.run(batches).result.microbatch_losses)) * 3 * len(batches)
    picked_rows = losses / total(model.last(model.first(x[:1]).tanh()), None).total
    assert torch.allclose(picked_rows, picked_rows.round(), rtol=0, atol=1e-6)
    counts = torch.stack([(found > one).sum() for one in least])
    assert (picked_rows - counts).abs().max() < 2


def model_first(model: Model, h: Tensor, batch: dict[str, Tensor]) -> Tensor:
    rows = h[h[:, 0] > 0]
    return model.again(rows) + h[batch["mask"]]


def batch_first(model: Model, h: Tensor, batch: dict[str, Tensor]) -> Tensor:
    rows = h[batch["mask"]]
    return model.again(h[h[:, 0] > 0]) + rows


@pytest.mark.parametrize("between", [model_first, batch_first])
def test_rows_picked_by_the_batch_meet_those_picked_by_the_model(between: Any) -> None:
    model = given_of(between)
    with torch.no_grad():
        model.first.weight.copy_(torch.eye(WIDTH))
    batches = [at_places(7, 1, 3), at_places(6, 1, 4)]
    assert_equal(model, total, batches, step_of(model, total), 1e-10)
    with pytest.raises(PartitionError, match="known at run time only"):
        step_of(model, total, split=["last"]).run(batches)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int8])
def test_only_what_is_not_negative_is_counted(dtype: torch.dtype) -> None:
    def occur(model: Model, h: Tensor, x: Tensor) -> Tensor:
        return model.again(h) * torch.bincount(h[:, 0].sign().to(dtype), minlength=WIDTH)[:WIDTH]

    model = model_of(occur)
    step = step_of(model, total)
    assert_equal(model, total, [rows(1, 4), rows(1, 6)], step, 1e-10)
    with pytest.raises(GuardError) as caught:
        step.run([rows(-1, 4)])
    assert "is negative" in str(caught.value.expected)


def meets_all(model: Model, h: Tensor, x: Tensor) -> Tensor:
    return h[h[:, 0] > 0] + h


def fact(model: Model, h: Tensor, x: Tensor) -> Tensor:
    number = (h[:, 0] > 0).sum().item()
    torch._check(number >= x.shape[0])
    return h[:number]


def share(model: Model, h: Tensor, x: Tensor) -> Tensor:
    number = (h[:, 0] > 0).sum().item()
    torch._check(number * 1.5 >= x.shape[0])
    return h[:number]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("between", [meets_all, fact, share])
def test_what_code_relies_on_is_checked_whenever_it_is_read(between: Any, backend: str) -> None:
    model = model_of(between)
    step = step_of(model, total, backend=backend)
    assert_equal(model, total, [rows(1, 4), rows(1, 6)], step, 1e-10)
    with pytest.raises(GuardError, match="do not fit together") as caught:
        step.run([rows(1, 4), rows(0, 9)])
    line = between.__code__.co_firstlineno
    assert str(caught.value.where) in [f"test_picked.py:{line + i}" for i in (1, 2)]
    assert "batch.shape[0]" in str(caught.value.expected)


def branches(model: Model, h: Tensor, x: Tensor) -> Tensor:
    rows = h[h[:, 0] > 0]
    return rows if rows.shape[0] > 2 else h


def loops(model: Model, h: Tensor, x: Tensor) -> Tensor:
    return sum((h * k for k in range((h[:, 0] > 0).sum().item())), h)


def plain(model: Model, h: Tensor, x: Tensor) -> Tensor:
    return h[: int((h[:, 0] > 0).sum())]


def hit(model: Model, h: Tensor, x: Tensor) -> Tensor:
    for number in (h.sum(0) > 0).nonzero():
        h = h * number
    return h


@pytest.mark.parametrize("between", [branches, loops, plain, hit])
def test_python_that_decides_on_a_number_is_refused(between: Any) -> None:
    with pytest.raises(CaptureError, match="decides on the contents") as caught:
        step_of(model_of(between), total).run([rows(0, 5)])
    assert "a number that is known only when the program runs" in str(caught.value.got)
    assert f"{__file__}:" in str(caught.value.where)


def test_rows_that_the_model_picks_stay_on_their_stage() -> None:
    class Cut(Model):
        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            return self.last(self.again(h[h[:, 0] > 0]))

    with pytest.raises(PartitionError, match="known at run time only") as caught:
        step_of(Cut(masked), total, split=["last"]).run([rows(0, 5).float()])
    assert "test_picked.py:" in str(caught.value.where)


def test_a_part_may_begin_at_a_place_that_is_read() -> None:
    def part(model: Model, h: Tensor, x: Tensor) -> Tensor:
        return model.again(h.narrow(0, (h[:, 0] > 0).sum().item(), 2)) + h.narrow(-1, -3, 3).sum()

    model = model_of(part)
    step = step_of(model, total)
    assert_equal(model, total, [rows(-1, 4), rows(-1, 6)], step, 1e-10)
    with pytest.raises(GuardError, match="do not fit together"):
        step.run([rows(1, 4)])


def test_explain_names_what_is_read() -> None:
    class Both(Decoder):
        def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
            logits = super().forward(tokens, mask)
            return logits + logits[logits > 0].mean()

    compiler = gc.GraphCompiler(Both(True), plain_sum, gc.Plan(quiet=True))
    compiler.capture(token_rows(6)[0])
    cut = compiler.partition()
    before = from_bytes(to_bytes(cut.joint.before))
    assert str(before.program) == str(cut.joint.before.program)
    text = explain(cut, gc.Plan(), compiler.schedule([cut]))
    lines = [line.split(" (test_")[0].strip() for line in text.splitlines() if "host sync" in line]
    assert lines == [
        "2 host syncs a microbatch, out of the batch, on every rank before a step: u0, u1",
        "1 host sync a microbatch, on stage 0",
    ]


def test_a_repeated_region_takes_the_places_that_were_counted() -> None:
    """Its mask, computed again, could be rounded another way."""

    def region(model: Model, h: Tensor) -> Tensor:
        return h * model.again(h.detach()[h.detach()[:, 0] > 0].sin()).sum()

    def repeated(model: Model, h: Tensor, x: Tensor) -> Tensor:
        return checkpoint(region, model, h, use_reentrant=False)

    step = step_of(model_of(repeated), total, split=["last"])
    step.run([rows(0, 7)])
    stage = step.latest[0].specialisation.partitions[False].stages[0]
    assert stage.backward is not None
    assert [str(program).count("nonzero_static(") for program in (stage.forward, stage.backward)] == [1, 0]
    assert "_again" in str(stage.backward)
