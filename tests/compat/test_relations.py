"""Relations are checked when real numbers are read."""

from __future__ import annotations

import pytest
import torch

from graphcomp.compat.reads import READ_NUMBERS
from graphcomp.errors import GuardError


def test_relations_are_checked_when_real_numbers_are_read() -> None:
    numbers = torch.tensor([2, 3])
    assert READ_NUMBERS(numbers, [5], "n0 + n1 == s0\tall rows\tmodel.py:3") == [2, 3]
    with pytest.raises(GuardError, match="do not fit together") as caught:
        READ_NUMBERS(numbers, [6], "0 <= n0\nn0 + n1 == s0\tall rows\tmodel.py:3")
    assert (caught.value.where, caught.value.expected) == ("model.py:3", "all rows")
    assert caught.value.got == "n0 = 2, n1 = 3, s0 = 6"
