"""Every zoo model, cut into 1 to 4 stages, computes bit by bit what the uncut program computes."""

from __future__ import annotations

import pytest

from tests.partition.running import check
from tests.wide import diagonal
from tests.zoo import ZOO


@pytest.mark.parametrize(("name", "stages"), diagonal(list(ZOO), (1, 2, 3, 4), step=2))
def test_stages_equal_the_uncut_program(name: str, stages: int) -> None:
    case = ZOO[name]
    batches = case.microbatches(2)
    check(case.build(), case.loss_fn, batches, stages)
