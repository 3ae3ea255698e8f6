"""Conditions on sizes: another rank's are those of the same microbatch, whatever symbols it has kept."""

from __future__ import annotations

import pytest
import sympy
import torch

from graphcomp.errors import VerifyError
from graphcomp.ir.sizes import Sizes


def test_conditions_of_another_rank() -> None:
    a, b, c = sympy.symbols("a b c", integer=True, positive=True)
    here = Sizes({"a": ("tokens", 1)}, {"tokens": (2, a), "labels": (2, a)})
    there = Sizes({"b": ("labels", 1), "c": ("tokens", 0)}, {"tokens": (c, b), "labels": (2, b)}, (b > 3, b > c, c > 1))
    found = here.conditions_of(there)
    assert found == (a > 3, a > 2, sympy.true)
    both = here.with_conditions(found)
    batches = [{"tokens": torch.zeros(2, n), "labels": torch.zeros(2, n)} for n in (3, 4)]
    assert [both.fit(leaves) for leaves in batches] == [None, {"a": 4}]


def test_what_no_microbatch_tells_is_no_condition() -> None:
    a, offset = sympy.symbols("a offset", integer=True, positive=True)
    here = Sizes({"a": ("tokens", 0)}, {"tokens": (a, 2)}, (a > 1,))
    with pytest.raises(VerifyError, match="relies on a size that no microbatch tells") as caught:
        here.with_conditions([a <= offset])
    assert (caught.value.where, caught.value.expected, caught.value.got) == ("a <= offset", "sizes a", "offset")
    with pytest.raises(VerifyError, match="no microbatch tells"):
        Sizes({"a": ("tokens", 0)}, {"tokens": (a, offset)})
