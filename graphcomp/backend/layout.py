"""The inputs a program was compiled for: dtypes, devices, sizes and strides, which compiled code takes for
granted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy
import torch

from graphcomp.errors import BackendError
from graphcomp.ir import meta
from graphcomp.ir.program import Program
from graphcomp.ir.spelling import expression


class Layouts:
    """What the inputs of one program have to look like. Keeps no graph alive."""

    def __init__(self, program: Program) -> None:
        self.name = program.name
        self.roles = [str(role) for role in program.inputs]
        self.expected = [_layout(meta.value(node)) for node in program.placeholders]

    def check(self, box: Sequence[Any]) -> None:
        """Compare inputs with what the program was compiled for.

        Raises BackendError naming the first input that differs: by then the program's callers disagree with
        it.
        """
        if len(box) != len(self.roles):
            raise self._error("inputs", len(self.roles), len(box))
        sizes = self._sizes(box)
        for role, expected, got in zip(self.roles, self.expected, box, strict=True):
            given = _layout(got)
            wanted = tuple(_numbers(part, sizes) for part in expected)
            if not _fits(wanted, given):
                raise self._error(role, _text(wanted), _text(given))

    def _sizes(self, box: Sequence[Any]) -> dict[sympy.Basic, int]:
        """The symbols' values, wherever one stands alone as a size."""
        found: dict[sympy.Basic, int] = {}
        for expected, got in zip(self.expected, box, strict=True):
            for wanted, given in zip(expected[0], _layout(got)[0], strict=False):
                if isinstance(wanted, sympy.Symbol):
                    found.setdefault(wanted, given)
        return found

    def _error(self, role: str, expected: object, got: object) -> BackendError:
        return BackendError(
            f"program '{self.name}' was given another input than it was compiled for",
            where=f"'{role}' of program '{self.name}'",
            expected=expected,
            got=got,
            do="compile the step again with the inputs as they are now",
        )


Layout = tuple[Any, ...]


def _layout(value: object) -> Layout:
    """(sizes, strides, dtype, device type) of a tensor; ((number,), kind) of anything else."""
    if isinstance(value, torch.Tensor):
        sizes, strides = (tuple(map(expression, numbers)) for numbers in (value.shape, value.stride()))
        return sizes, strides, value.dtype, value.device.type
    return (expression(value),), (), "number", ""


def _numbers(part: Any, sizes: dict[sympy.Basic, int]) -> Any:
    """Expressions as the numbers they come to; one that cannot be told stays."""
    if not isinstance(part, tuple):
        return part
    values = [p.xreplace(sizes) if isinstance(p, sympy.Basic) else p for p in part]
    return tuple(int(v) if isinstance(v, sympy.Integer) else v for v in values)


def _fits(wanted: Layout, given: Layout) -> bool:
    if wanted[2:] != given[2:] or len(wanted[0]) != len(given[0]):
        return False
    if not all(_same(w, g) for w, g in zip(wanted[0], given[0], strict=True)):
        return False
    if 0 in given[0] or not given[1]:
        return True
    # Nobody steps along a dimension of one element.
    strides = zip(given[0], wanted[1], given[1], strict=True)
    return all(size == 1 or _same(w, g) for size, w, g in strides)


def _same(wanted: object, given: object) -> bool:
    return isinstance(wanted, sympy.Basic) or wanted == given


def _text(layout: Layout) -> str:
    sizes, strides, dtype, device = layout
    if dtype == "number":
        return str(sizes[0])
    return f"{dtype} of sizes {list(sizes)}, strides {list(strides)}, on {device}"
