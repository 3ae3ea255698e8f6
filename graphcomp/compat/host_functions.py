"""Functions of sizes that the host computes, out of sympy expressions. The printer that writes them has no public name.

Python's own `or` and `and` ask their first operand at once, which a symbolic one cannot answer: so they are calls.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch.fx.experimental.symbolic_shapes import sym_and, sym_or
from torch.utils._sympy.printers import PythonPrinter

_OF_NUMBERS: Mapping[str, Any] = {
    "math": math,
    "torch": torch,
    "all_of": lambda *parts: all(parts),
    "any_of": lambda *parts: any(parts),
}
_OF_SYMBOLS: Mapping[str, Any] = {
    "math": math, "torch": torch, "min": torch.sym_min, "max": torch.sym_max, "all_of": sym_and, "any_of": sym_or,
}  # fmt: skip


class _Printer(PythonPrinter):
    def _print_And(self, expr: sympy.Basic) -> str:
        return f"all_of({', '.join(map(self.doprint, expr.args))})"

    def _print_Or(self, expr: sympy.Basic) -> str:
        return f"any_of({', '.join(map(self.doprint, expr.args))})"

    def _print_Not(self, expr: sympy.Basic) -> str:
        return f"torch.sym_not({self.doprint(expr.args[0])})"

    def _print_Where(self, expr: sympy.Basic) -> str:
        return f"torch.sym_ite({', '.join(map(self.doprint, expr.args))})"


def text_of(expression: object) -> str:
    """An expression of sizes as Python, over the names of its symbols."""
    text: str = _Printer().doprint(sympy.sympify(expression))
    return text


@functools.lru_cache(maxsize=10_000)
def function_of(text: str, names: Sequence[str], symbolic: bool = False) -> Callable[..., Any]:
    """A function of what has these names (positional), out of its text. names: a tuple.

    symbolic: whether it is given symbolic numbers.
    """
    namespace = dict(_OF_SYMBOLS if symbolic else _OF_NUMBERS)
    found: Callable[..., Any] = eval(f"lambda {', '.join(names)}: {text}", namespace)
    return found
