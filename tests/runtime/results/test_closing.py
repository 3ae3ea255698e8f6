"""Losses and metrics of a step, from what single ranks recorded."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from graphcomp.capture.joint import LossSpec, MetricSpec
from graphcomp.ir.signature import Loss, Metric, Role
from graphcomp.partition.stages import Partitioned, Stage
from graphcomp.runtime.results.closing import Closed, Closing, DataRanks
from tests.runtime.chain import chain, program

LOSSES = (LossSpec("main", "token"), LossSpec("aux", "mean"))
METRICS = tuple(MetricSpec(kind, kind) for kind in ("sum", "mean", "max", "min", "last"))  # type: ignore[arg-type]
ROLES: list[list[Role]] = [
    [Loss("aux"), Metric("max")],
    [Loss("main"), Metric("sum"), Metric("mean"), Metric("min"), Metric("last")],
]
DENOMINATORS = {"main": torch.tensor(10), "aux": torch.tensor(3)}


def cut() -> Partitioned:
    """Two stages that both have something to report."""
    stages = [Stage(s, program("f", [], roles), None, program("f", [], roles)) for s, roles in enumerate(ROLES)]
    whole = chain(1).cut
    joint = dataclasses.replace(whole.joint, losses=LOSSES, metrics=METRICS)
    return dataclasses.replace(whole, joint=joint, stages=tuple(stages))


def recorded(rank: int, microbatches: int, shift: float = 0.0) -> list[tuple[tuple[int, Role], torch.Tensor]]:
    """Value of microbatch m: 0.1 + m, in fp32; an integer for the sum."""
    found = []
    for m in range(microbatches):
        for role in ROLES[rank]:
            whole = isinstance(role, Metric) and role.name == "sum"
            value = torch.tensor(m + int(shift)) if whole else torch.tensor(0.1 + m + shift)
            found.append(((m, role), value))
    return found


def packed(closing: Closing, rank: int, microbatches: int, shift: float = 0.0, other: int = 0) -> torch.Tensor:
    """The vector of a rank that holds the stage of its own number, or the one so many stages before it."""
    records = recorded(rank, microbatches, shift)
    pack = closing.packing([key for key, _ in records], [rank - other])
    return pack([value for _, value in records])


def vector_of(closing: Closing, microbatches: int, shift: float = 0.0) -> torch.Tensor:
    return packed(closing, 0, microbatches, shift) + packed(closing, 1, microbatches, shift)


def numbers(closed: Closed) -> dict[str, float]:
    return {name: float(value) for name, value in closed.metrics.items()}


def test_every_rank_gets_every_value() -> None:
    closing = Closing([cut()] * 3)
    closed = closing.close(vector_of(closing, 3), DENOMINATORS)
    values = [float(torch.tensor(0.1 + m)) for m in range(3)]
    assert float(closed.losses["main"]) == pytest.approx(sum(values) / 10, rel=1e-15)
    assert float(closed.losses["aux"]) == pytest.approx(sum(values) / 3, rel=1e-15)
    assert float(closed.loss) == float(closed.losses["main"]) + float(closed.losses["aux"])
    assert [float(one) for one in closed.microbatch_losses] == pytest.approx([v / 10 + v / 3 for v in values])
    assert closed.loss.shape == closed.microbatch_losses[0].shape == ()
    assert numbers(closed) == {
        "sum": 3.0,
        "mean": pytest.approx(sum(values) / 3, rel=1e-15),
        "max": values[2],
        "min": values[0],
        "last": values[2],
    }


def test_a_rank_packs_only_what_its_stages_are_asked_for() -> None:
    closing = Closing([cut()] * 2)
    one, other = (packed(closing, rank, 2) for rank in range(2))
    assert one.dtype is torch.float64
    assert not bool(((one != 0) & (other != 0)).any())
    assert not bool(packed(closing, 1, 2, other=1).any())


def test_no_microbatch() -> None:
    closing = Closing([], losses=LOSSES, metrics=METRICS)
    closed = closing.close(packed(closing, 0, 0), DENOMINATORS)
    assert float(closed.loss) == 0.0
    assert closed.microbatch_losses == ()
    found = numbers(closed)
    assert math.isnan(found.pop("mean"))
    assert found == {"sum": 0.0, "last": 0.0, "max": -math.inf, "min": math.inf}


def test_without_losses() -> None:
    closing = Closing([cut()], losses=(), metrics=METRICS[:1])
    closed = closing.close(vector_of(closing, 1), {})
    assert float(closed.loss) == 0.0
    assert [float(one) for one in closed.microbatch_losses] == [0.0]


def test_data_ranks_with_different_counts() -> None:
    first, second, third = Closing([cut()] * 2), Closing([cut()]), Closing([], losses=LOSSES, metrics=METRICS)
    vectors = [vector_of(first, 2), vector_of(second, 1, 5.0), torch.zeros(third.length, dtype=torch.float64)]
    closed = first.close_together([second, third], vectors, DENOMINATORS)
    values = [float(torch.tensor(value)) for value in (0.1, 1.1, 5.1)]
    assert [len(one.microbatch_losses) for one in closed] == [2, 1, 0]
    for one in closed:
        assert float(one.losses["main"]) == pytest.approx(sum(values) / 10, rel=1e-15)
        assert numbers(one) == {
            "sum": 6.0,
            "mean": pytest.approx(sum(values) / 3, rel=1e-15),
            "max": values[2],
            "min": values[0],
            "last": values[1],  # the last microbatch of data rank 0
        }


def test_data_ranks_over_a_group_agree_with_those_of_one_process() -> None:
    first, second = Closing([cut()] * 2), Closing([cut()])
    vectors = [vector_of(first, 2), vector_of(second, 1, 5.0)]
    together = first.close_together([second], vectors, DENOMINATORS)[0]
    parts: list[list[torch.Tensor]] = [[], []]
    for number, (one, vector) in enumerate(zip((first, second), vectors, strict=True)):
        one.close(
            vector,
            DENOMINATORS,
            DataRanks(
                lambda v, n=number: parts[n].append(v.clone()),
                lambda v, n=number: parts[n].append(v.clone()),
                number == 0,
            ),
        )
    closed = first.close(
        vectors[0],
        DENOMINATORS,
        DataRanks(
            lambda v: v.copy_(parts[0][0] + parts[1][0]),
            lambda v: v.copy_(torch.maximum(parts[0][1], parts[1][1])),
            True,
        ),
    )
    assert numbers(closed) == numbers(together)
    assert float(closed.loss) == float(together.loss)
