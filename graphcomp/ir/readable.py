"""Relations of sizes as a user would write them: `x.shape[0] % 2 == 0`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sympy
from sympy.printing.precedence import PRECEDENCE
from sympy.printing.str import StrPrinter


def readable(relation: object, names: Mapping[str, str] | None = None) -> str:
    """names: what symbols are called, where not by their own names."""
    text: str = _Printer(names or {}).doprint(sympy.sympify(relation))
    return text


class _Printer(StrPrinter):
    def __init__(self, names: Mapping[str, str]) -> None:
        super().__init__()
        self._names = names

    def _print_Symbol(self, expr: Any) -> str:
        return self._names.get(expr.name, str(expr.name))

    def _print_Relational(self, expr: Any) -> str:
        return f"{self._print(expr.lhs)} {expr.rel_op} {self._print(expr.rhs)}"

    def _print_And(self, expr: Any) -> str:
        return " and ".join(self._parts(expr, "And"))

    def _print_Or(self, expr: Any) -> str:
        return " or ".join(self._parts(expr, "Or"))

    def _print_Not(self, expr: Any) -> str:
        return f"not ({self._print(expr.args[0])})"

    def _print_Mod(self, expr: Any) -> str:
        return " % ".join(self.parenthesize(part, PRECEDENCE["Mul"], strict=True) for part in expr.args)

    _print_PythonMod = _print_Mod

    def _parts(self, expr: Any, operation: str) -> list[str]:
        return sorted(self.parenthesize(part, PRECEDENCE[operation]) for part in expr.args)
