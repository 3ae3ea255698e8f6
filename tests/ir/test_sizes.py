"""Conditions on sizes: another rank's are those of the same microbatch, whatever symbols it has kept."""

from __future__ import annotations

from dataclasses import replace

import pytest
import sympy
import torch

from graphcomp.errors import AgreementError, VerifyError
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


def test_a_condition_on_what_is_not_asked_for_here() -> None:
    a, b = sympy.symbols("a b", integer=True, positive=True)
    here = Sizes({"a": ("tokens", 0)}, {"tokens": (a, 2)})
    there = Sizes({"a": ("tokens", 0), "b": ("mask", 1)}, {"tokens": (a, 2), "mask": (2, b)}, (a > 1, sympy.Ne(b, a)))
    with pytest.raises(AgreementError, match="relies on a size that another does not ask for") as caught:
        here.conditions_of(there)
    assert (caught.value.expected, caught.value.got) == ("sizes of tokens", "mask.shape[1] != tokens.shape[0]")
    assert here.conditions_of(replace(there, conditions=(a > 1,))) == (a > 1,)


def test_what_no_microbatch_tells_is_no_condition() -> None:
    a, offset = sympy.symbols("a offset", integer=True, positive=True)
    here = Sizes({"a": ("tokens", 0)}, {"tokens": (a, 2)}, (a > 1,))
    with pytest.raises(VerifyError, match="relies on a size that no microbatch tells") as caught:
        here.with_conditions([a <= offset])
    assert (caught.value.where, caught.value.expected, caught.value.got) == ("a <= offset", "sizes a", "offset")
    with pytest.raises(VerifyError, match="no microbatch tells"):
        Sizes({"a": ("tokens", 0)}, {"tokens": (a, offset)})
