"""Relations of sizes as a user would write them."""

from __future__ import annotations

import pytest
import sympy
from torch.utils._sympy.functions import Mod, PythonMod

from graphcomp.ir.readable import readable

a, b, c = sympy.symbols("a b c", integer=True, positive=True)


@pytest.mark.parametrize(
    ("relation", "text"),
    [
        (sympy.Ne(a, 1), "x.shape[0] != 1"),
        (sympy.Eq(a, b), "x.shape[0] == b"),
        (2 * a - b <= 7, "2*x.shape[0] - b <= 7"),
        (sympy.Eq(Mod(a, 3), 0), "x.shape[0] % 3 == 0"),
        (sympy.Eq(PythonMod(a + b, 3), 0), "(x.shape[0] + b) % 3 == 0"),
        (sympy.And(a > 3, sympy.Or(b < c, b > 2 * c)), "(b < c or b > 2*c) and x.shape[0] > 3"),
        (sympy.Not(sympy.Or(sympy.Eq(a, 1), a > b), evaluate=False), "not (x.shape[0] == 1 or x.shape[0] > b)"),
    ],
)
def test_as_in_python(relation: sympy.Basic, text: str) -> None:
    assert readable(relation, {"a": "x.shape[0]"}) == text
