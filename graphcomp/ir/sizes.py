"""Symbolic sizes: which numbers of a microbatch they are, and the conditions a program relies on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import sympy
import torch

from graphcomp.compat.host_functions import function_of, text_of
from graphcomp.errors import AgreementError, VerifyError
from graphcomp.ir.readable import readable

Expression: TypeAlias = sympy.Expr | int


def evaluator(expressions: Sequence[object], symbols: Sequence[str]) -> Callable[..., tuple[Any, ...]]:
    """Compile expressions into one host function of the sizes (positional, in the order of `symbols`)."""
    return function_of(f"({''.join(f'{text_of(each)}, ' for each in expressions)})", tuple(symbols))


@dataclass(frozen=True)
class Sizes:
    """The sizes of one microbatch that a program does not fix.

    symbols: name of the symbol -> (path of the batch leaf, dimension) where its value is read.
    shapes: what the program takes each batch leaf's shape to be; this ties leaves whose sizes must be equal.
    conditions: sympy relations over the symbols that hold for every microbatch the program may serve.

    Raises VerifyError for a shape or a condition over other symbols: no microbatch says what these are.
    """

    symbols: Mapping[str, tuple[str, int]]
    shapes: Mapping[str, tuple[Expression, ...]]
    conditions: tuple[Any, ...] = ()

    def __post_init__(self) -> None:
        for each in (*(size for shape in self.shapes.values() for size in shape), *self.conditions):
            unknown = sorted({str(symbol) for symbol in sympy.sympify(each).free_symbols} - self.symbols.keys())
            if unknown:
                raise VerifyError(
                    "a program relies on a size that no microbatch tells",
                    where=str(each),
                    expected=f"sizes {', '.join(self.symbols) or '(none)'}",
                    got=", ".join(unknown),
                )

    def bind(self, leaves: Mapping[str, torch.Tensor]) -> dict[str, int]:
        """Read the sizes of a microbatch (leaves by path) on the host."""
        return {symbol: leaves[path].shape[dim] for symbol, (path, dim) in self.symbols.items()}

    def fit(self, leaves: Mapping[str, torch.Tensor]) -> dict[str, int] | None:
        """The sizes of a microbatch; None unless it meets every shape and condition. One compiled host function."""
        sizes = self.bind(leaves)
        found = [size for path in self.shapes for size in leaves[path].shape]
        return sizes if self._fits(found, *sizes.values()) else None

    def differences(self, sizes: Mapping[str, int], leaves: Mapping[str, torch.Tensor]) -> list[str]:
        """In words, what a microbatch does not meet."""
        values = [sizes[symbol] for symbol in self.symbols]
        found = []
        expected = iter(self._shapes(*values))
        for path, shape in self.shapes.items():
            want = tuple(next(expected) for _ in shape)
            if want != tuple(leaves[path].shape):
                found.append(f"{path} has shape {tuple(leaves[path].shape)}, expected {want}")
        for condition, holds in zip(self.conditions, self._conditions(*values), strict=True):
            if not holds:
                found.append(f"{self.readable(condition)} does not hold")
        return found

    def readable(self, condition: object) -> str:
        """A condition with each symbol written as the size it stands for."""
        return readable(condition, self.names)

    @property
    def names(self) -> dict[str, str]:
        """What the user calls the size that each symbol stands for."""
        return {symbol: f"{path}.shape[{dim}]" for symbol, (path, dim) in self.symbols.items()}

    def with_conditions(self, more: Sequence[Any]) -> Sizes:
        """The same sizes under further conditions, such as those a compiler adds."""
        return Sizes(self.symbols, self.shapes, tuple(dict.fromkeys((*self.conditions, *more))))

    def conditions_of(self, other: Sizes) -> tuple[Any, ...]:
        """Another rank's conditions on the same microbatch, over the symbols here: of sizes that are equal by what a
        program does, ranks may have kept different ones.

        Raises AgreementError for a condition on a size of a batch leaf of which no size matters here.
        """
        here = {
            name: sympy.sympify(self.shapes[path][dim])
            for name, (path, dim) in other.symbols.items()
            if path in self.shapes and dim < len(self.shapes[path])
        }
        for each in other.conditions:
            if not here.keys() >= {str(symbol) for symbol in each.free_symbols}:
                raise AgreementError(
                    "ranks have captured different programs: one relies on a size that another does not ask for",
                    expected=f"sizes of {', '.join(self.shapes) or '(nothing)'}",
                    got=other.readable(each),
                    do="let all ranks run the same code on a microbatch",
                )
        return tuple(
            each.xreplace({symbol: here[str(symbol)] for symbol in each.free_symbols}) for each in other.conditions
        )

    @cached_property
    def _fits(self) -> Callable[..., bool]:
        """Of all sizes of a microbatch, in the order of `shapes`, and those that the symbols are."""
        sizes = [text_of(size) for shape in self.shapes.values() for size in shape]
        tests = [f"found == [{', '.join(sizes)}]", *(f"({text_of(condition)})" for condition in self.conditions)]
        return function_of(" and ".join(tests), ("found", *self.symbols))

    @cached_property
    def _conditions(self) -> Callable[..., tuple[Any, ...]]:
        return evaluator(self.conditions, list(self.symbols))

    @cached_property
    def _shapes(self) -> Callable[..., tuple[Any, ...]]:
        return evaluator([size for shape in self.shapes.values() for size in shape], list(self.symbols))
