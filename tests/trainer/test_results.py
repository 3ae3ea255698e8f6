"""Results for loggers, and put together over several calls: what one call over all microbatches would say."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphcomp as gc
from graphcomp.errors import StepError
from graphcomp.testing import HostSyncs, VirtualStep

EAGER = gc.Plan(backend="eager", quiet=True)


class Rated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).squeeze(-1)


def loss_fn(output: Tensor, batch: dict[str, Tensor]) -> Any:
    """A loss of its own for each of three sources, an auxiliary term, and a metric of every kind."""
    error = output.square() * batch["valid"]
    total = {f"source {n}": (error * (batch["source"] == n)).sum() for n in range(3)}
    counts = {f"source {n}": (batch["valid"] * (batch["source"] == n)).sum() for n in range(3)}
    losses: dict[str, Any] = {
        "lm": gc.TokenLoss(error.sum(), batch["valid"]),
        "size": gc.mean_loss(output.abs().mean()),
    }
    metrics = {f"{kind} of largest": gc.metric(output.max(), kind) for kind in ("sum", "mean", "max", "min", "last")}
    metrics |= {name: gc.metric(value, "sum") for name, value in total.items()}
    metrics |= {f"tokens of {name}": gc.metric(value, "sum") for name, value in counts.items()}
    return losses, metrics


def batches(number: int, seed: int = 0) -> list[dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(number):
        rows = int(torch.randint(1, 6, (), generator=draw))
        valid = torch.randint(2, (rows,), generator=draw)
        found.append(
            {
                "x": torch.randn(rows, 3, generator=draw),
                "valid": valid,
                "source": torch.randint(3, (rows,), generator=draw),
            }
        )
    return found


def test_one_transfer_for_all_numbers() -> None:
    step = gc.compile_train_step(Rated(), loss_fn, plan=EAGER)
    result = step(batches(3))
    named = result.as_dict()
    assert named["loss"] is result.loss and named["losses/lm"] is result.losses["lm"]
    assert named["tokens/lm"] is result.tokens["lm"] and "metrics/max of largest" in named
    stacked: list[int] = []
    original = torch.stack

    def counted(values: Any, *rest: Any) -> Tensor:
        stacked.append(len(values))
        return original(values, *rest)

    torch.stack = counted
    try:
        with HostSyncs() as syncs:
            numbers = result.to_floats()
    finally:
        torch.stack = original
    # One tensor of all numbers is read; none is read by itself.
    assert stacked == [len(named)] and not syncs.found
    assert numbers == {name: float(value) for name, value in named.items()}
    assert all(type(value) is float for value in numbers.values())


def test_a_loss_for_each_source_costs_nothing_more() -> None:
    """Shares of one loss, by where the tokens come from: metrics like any other, at every layout."""
    model, given = Rated(), batches(4)
    with torch.no_grad():
        expected = torch.zeros(3)
        for batch in given:
            expected.index_add_(0, batch["source"], model(batch["x"]).square() * batch["valid"])
    step = gc.compile_train_step(model, loss_fn, plan=EAGER)
    virtual = VirtualStep(model, loss_fn, plan=EAGER, data_ranks=2)
    for result in (step(given), virtual.run([given[:1], given[1:]]).result):
        found = [float(result.metrics[f"source {n}"]) for n in range(3)]
        assert found == pytest.approx(expected.tolist())
        assert sum(found) == pytest.approx(float(result.losses["lm"] * result.tokens["lm"]))
    # Sizes 0 and 1 may need a program of their own; another mix of sources does not.
    before = step.stats.traces
    step([batch | {"source": torch.zeros_like(batch["source"])} for batch in given])
    assert step.stats.traces == before


@pytest.mark.parametrize("data_ranks", [1, 2])
def test_parts_come_together_to_the_whole(data_ranks: int) -> None:
    given = batches(9)
    step = VirtualStep(
        Rated(), loss_fn, plan=gc.Plan(backend="eager", quiet=True, max_programs=16), data_ranks=data_ranks
    )

    def run(part: list[Any]) -> gc.StepResult:
        return step.evaluate([part[::2], part[1::2]] if data_ranks > 1 else part)

    whole = run(given)
    combined = gc.combine(run(given[start : start + 4]) for start in (0, 4)) if data_ranks > 1 else None
    if combined is None:
        combined = gc.combine(run(given[start : start + 4]) for start in (0, 4, 8))
    else:
        whole = run(given[:8])
    names = [name for name in whole.as_dict() if data_ranks == 1 or "last" not in name]
    one, two = whole.to_floats(), combined.to_floats()
    assert one.keys() == two.keys()
    for name in names:
        assert two[name] == pytest.approx(one[name], rel=1e-6), name
    assert combined.microbatch_losses == () and combined.outputs is None
    again = gc.combine([combined, whole]).to_floats()
    assert again["losses/lm"] == pytest.approx(one["losses/lm"]) and again["tokens/lm"] == 2 * one["tokens/lm"]


def test_calls_without_a_token_weigh_nothing() -> None:
    step = gc.compile_train_step(Rated(), loss_fn, plan=EAGER)
    some, none = batches(2)[1], batches(2)[1]
    none["valid"] = torch.zeros_like(none["valid"])
    results = [step.evaluate([some]), step.evaluate([none])]
    assert float(results[1].losses["lm"]) == 0
    assert float(gc.combine(results).losses["lm"]) == pytest.approx(float(results[0].losses["lm"]))
    assert float(gc.combine(results[1:]).losses["lm"]) == 0


def test_nothing_to_combine() -> None:
    with pytest.raises(StepError, match="no result to combine"):
        gc.combine([])
