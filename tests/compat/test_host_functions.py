"""What is written of sizes as Python is the same on plain numbers as the expression, and asks nothing of symbols."""

from __future__ import annotations

import pytest
import sympy
import torch
from torch.utils._sympy.functions import (
    CeilToInt,
    FloatTrueDiv,
    FloorDiv,
    IntTrueDiv,
    Mod,
    OpaqueUnaryFn_sqrt,
    ToFloat,
    TruncToInt,
    Where,
)

from graphcomp.compat.host_functions import function_of, text_of
from graphcomp.compat.reads import READ_NUMBERS
from graphcomp.compat.symbols import new_fake_mode

a, b = sympy.symbols("a b", integer=True, nonnegative=True)
RELATIONS = [
    sympy.Or(sympy.Eq(a, 1), sympy.Eq(a, b)),
    sympy.Or(sympy.And(a < 1, b > 2), sympy.Not(sympy.Or(a < 2, b < 3), evaluate=False)),
    CeilToInt(IntTrueDiv(a, 2)) <= b,
    TruncToInt(FloatTrueDiv(ToFloat(a), 2.0)) < b,
    OpaqueUnaryFn_sqrt(ToFloat(a)) < b,
    sympy.Eq(Mod(a, 2), FloorDiv(b, 2)),
    sympy.Min(a, b) <= sympy.Max(a - b, 2),
    Where(a < b, a, b) < 3,
]


@pytest.mark.parametrize("relation", RELATIONS, ids=str)
def test_a_function_of_plain_numbers(relation: sympy.Basic) -> None:
    holds = function_of(text_of(relation), ("a", "b"))
    pairs = [(n, m) for n in range(5) for m in range(5)]
    assert [bool(holds(n, m)) for n, m in pairs] == [bool(relation.subs({a: n, b: m})) for n, m in pairs]


@pytest.mark.parametrize("relation", RELATIONS, ids=str)
def test_what_holds_of_numbers_nobody_knows_is_believed(relation: sympy.Basic) -> None:
    mode = new_fake_mode()
    numbers = mode.from_tensor(torch.tensor([1, 3]), static_shapes=True)
    stated = relation.xreplace({a: sympy.Symbol("n0", integer=True), b: sympy.Symbol("n1", integer=True)})
    with mode:
        found = READ_NUMBERS(numbers, [], text_of(stated))
    assert len(found) == 2 and mode.shape_env.deferred_runtime_asserts  # type: ignore[union-attr]
