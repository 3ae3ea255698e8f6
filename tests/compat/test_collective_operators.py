"""The operators of functional collectives: their arguments, and values without any process group."""

from __future__ import annotations

import pytest
import torch

from graphcomp.compat import collective_operators as ops
from graphcomp.compat.operators import argument_names
from graphcomp.compat.symbols import new_fake_mode

CALLS = [
    (ops.ALL_REDUCE, ("sum", "dp"), ["input", "reduce_op", "group_name"], (6, 4)),
    (ops.ALL_GATHER, (3, "dp"), ["input", "group_size", "group_name"], (18, 4)),
    (ops.REDUCE_SCATTER, ("sum", 3, "dp"), ["input", "reduce_op", "group_size", "group_name"], (2, 4)),
    (
        ops.ALL_TO_ALL,
        ([2, 1], [3, 3], "dp"),
        ["input", "output_split_sizes", "input_split_sizes", "group_name"],
        (3, 4),
    ),
    (ops.BROADCAST, (0, "dp"), ["input", "src", "group_name"], (6, 4)),
    (ops.WAIT, (), ["tensor"], (6, 4)),
]


@pytest.mark.parametrize(("target", "rest", "names", "shape"), CALLS, ids=lambda part: str(part))
def test_arguments_and_shapes(target: object, rest: tuple, names: list[str], shape: tuple[int, ...]) -> None:
    assert argument_names(target) == names  # type: ignore[arg-type]
    with new_fake_mode():
        assert target(torch.empty(6, 4), *rest).shape == shape  # type: ignore[operator]


def test_what_was_not_begun_is_complete() -> None:
    given = torch.ones(2)
    assert ops.WAIT(given).data_ptr() == given.data_ptr()
