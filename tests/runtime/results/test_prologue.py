"""Token counts of a step."""

from __future__ import annotations

import torch

from graphcomp.capture.joint import LossSpec
from graphcomp.runtime.results.prologue import count

TOKEN, OTHER, MEAN = LossSpec("token", "token"), LossSpec("other", "token"), LossSpec("mean", "mean")


def test_whole_numbers_stay_64_bit_integers() -> None:
    large = 2**62
    counts = count([TOKEN], [{"token": torch.tensor(large)}, {"token": torch.tensor(3, dtype=torch.int32)}])
    assert counts.tokens["token"].dtype is torch.int64
    assert int(counts.tokens["token"]) == int(counts.denominators["token"]) == large + 3


def test_weights_are_added_in_double_precision() -> None:
    given = [
        {"token": torch.tensor(0.25)},
        {"token": torch.tensor(2**24 + 0.0)},
        {"token": torch.tensor(1.0)},
    ]
    counts = count([TOKEN], given)
    assert counts.tokens["token"].dtype is torch.float64
    assert float(counts.denominators["token"]) == 2**24 + 1.25


def test_zero_is_reported_and_not_divided_by() -> None:
    counts = count([TOKEN, OTHER], [{"token": torch.tensor(0), "other": torch.tensor(0.0)}])
    assert [float(value) for value in counts.tokens.values()] == [0.0, 0.0]
    assert [float(value) for value in counts.denominators.values()] == [1.0, 1.0]


def test_a_mean_loss_is_divided_by_the_number_of_microbatches() -> None:
    counts = count([MEAN, TOKEN], [{"token": torch.tensor(5)}, {}, {"token": torch.tensor(1)}])
    assert list(counts.tokens) == ["mean", "token"]
    assert [int(value) for value in counts.tokens.values()] == [3, 6]


def test_no_microbatch() -> None:
    counts = count([TOKEN, MEAN], [])
    assert [int(value) for value in counts.tokens.values()] == [0, 0]
    assert [int(value) for value in counts.denominators.values()] == [1, 1]


def test_data_ranks_add_up_in_one_call_a_kind_even_without_microbatches() -> None:
    calls: list[torch.Tensor] = []

    def reduce(vector: torch.Tensor) -> torch.Tensor:
        calls.append(vector)
        return vector + torch.tensor([10, 100] if vector.dtype is torch.int64 else [0.5])

    losses, floating = [TOKEN, OTHER, MEAN], {"other"}
    for given, tokens in (
        ([{"token": torch.tensor(3), "other": torch.tensor(2.0)}], [13.0, 2.5, 101.0]),
        ([], [10.0, 0.5, 100.0]),
    ):
        counts = count(losses, given, floating=floating, reduce=reduce)
        assert [float(value) for value in counts.tokens.values()] == tokens
    assert [vector.dtype for vector in calls] == [torch.int64, torch.float64] * 2
