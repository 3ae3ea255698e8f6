"""Which symbols a program's values are made of, and which of them its inputs give."""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter

import sympy
import torch
from torch.fx import Node

from graphcomp.compat.symbols import FakeTensorMode, expression, size_value
from graphcomp.ir import meta
from graphcomp.ir.program import Program
from graphcomp.ir.signature import Size

_NAME = attrgetter("name")  # what `str` says too, only slowly


def symbols_of(value: object, mode: FakeTensorMode) -> Iterator[tuple[str, torch.SymInt]]:
    """The symbols in a value (tensor, number or several), each with a symbolic integer it occurs in."""
    if isinstance(value, tuple | list):
        for part in value:
            yield from symbols_of(part, mode)
    elif isinstance(value, torch.Tensor):
        for size in value.shape:
            yield from symbols_of(size, mode)
    elif isinstance(value, torch.SymInt):
        found = expression(mode, value)
        if isinstance(found, sympy.Basic):
            yield from ((symbol.name, value) for symbol in sorted(found.free_symbols, key=_NAME))


def bare_symbols(node: Node, program: Program) -> set[str]:
    """The symbols that are a dimension of a node's tensor by themselves, so that they can be read off it."""
    tensor = meta.tensor(node)
    numbers = [expression(program.fake_mode, size) for size in tensor.shape] if tensor is not None else []
    return {str(number) for number in numbers if isinstance(number, sympy.Symbol)}


def with_all_sizes(program: Program) -> Program:
    """A copy with a `Size` input for every symbol in its inputs' shapes; added ones stand last."""
    program = program.copy()
    known = {role.symbol for role in program.inputs if isinstance(role, Size)}
    last: Node | None = program.placeholders[-1] if program.inputs else None
    roles = list(program.inputs)
    for node in program.placeholders:
        for symbol, like in symbols_of(meta.value(node), program.fake_mode):
            if symbol in known or last is None:
                continue
            known.add(symbol)
            with program.graph.inserting_after(last):
                last = program.graph.placeholder(f"size_{symbol}")
            meta.set_value(last, size_value(like, _symbol(like, symbol, program.fake_mode)))
            roles.append(Size(symbol))
    program.set_signature(roles, program.outputs)
    return program


def _symbol(number: torch.SymInt, name: str, mode: FakeTensorMode) -> sympy.Symbol:
    found = expression(mode, number)
    symbols = found.free_symbols if isinstance(found, sympy.Basic) else ()
    return next(symbol for symbol in symbols if str(symbol) == name)
