"""Rows of a parameter by rank, as torch splits them."""

from __future__ import annotations

import pytest
import torch

from graphcomp.dataparallel.spec import Shards
from graphcomp.errors import PlanError
from tests.dataparallel.running import spec


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 5, 8, 9, 21])
def test_rows_are_those_of_chunk(rows: int, ranks: int) -> None:
    of = Shards(spec("w", rows, 2), ranks)
    expected = [len(part) for part in torch.empty(rows, 2).chunk(ranks)]
    expected += [0] * (ranks - len(expected))
    assert [of.rows_of(rank) for rank in range(ranks)] == expected
    assert of.chunk == max(expected)
    assert of.padded == (of.chunk, 2)
    assert sum(map(of.rows_of, range(ranks))) == of.rows == rows


def test_trailing_ranks_may_hold_nothing() -> None:
    of = Shards(spec("w", 5), 4)
    assert [of.rows_of(rank) for rank in range(4)] == [2, 2, 1, 0]
    assert (of.name, of.chunk, of.padded, of.spec.numel) == ("w", 2, (2,), 5)


def test_what_cannot_be_split_is_refused_by_name() -> None:
    with pytest.raises(PlanError, match="'logit_scale' cannot be split over data ranks: it has no dimension"):
        Shards(spec("logit_scale"), 2)
    with pytest.raises(PlanError, match="'w' cannot be split over 0 data ranks"):
        Shards(spec("w", 4), 0)
    with pytest.raises(PlanError, match="no data rank 3"):
        Shards(spec("w", 4), 3).rows_of(3)
