"""Sizes known at run time only: how they are told from those that a program is given.

Such a number is read out of a tensor by one of the operators of `reads`. While a program is traced nobody knows the
contents of tensors, so a symbol of a second kind stands for it ("unbacked"), which no input of a program shows:

    reads          the operators that read, and what they do with real tensors
    fake_reads     what they yield of fake ones: symbols
    known_splits   while one program is traced, the same splits stand for the same symbols
    relations      what is checked of the numbers at each read, as text
    believed       the same relations as a trace believes them; which of them nobody checks yet
    estimates      what a symbol is taken for where memory and time are estimated
"""

from __future__ import annotations

import sympy
import torch
from torch.utils._sympy.symbol import SymT, prefix_str


def is_run_time(number: object) -> bool:
    """Whether a number, or a size of a tensor or of one of several, is known at run time only. Adds no guard."""
    if isinstance(number, tuple | list):
        return any(map(is_run_time, number))
    if isinstance(number, torch.Tensor):
        strides = number.stride() if number.layout is torch.strided else ()
        return any(map(is_run_time, (*number.shape, *strides)))
    if isinstance(number, torch.SymInt | torch.SymFloat | torch.SymBool):
        number = number.node.expr
    return isinstance(number, sympy.Basic) and any(is_run_time_name(str(symbol)) for symbol in number.free_symbols)


def is_run_time_name(symbol: str) -> bool:
    """Whether this is the name of a symbol of the second kind."""
    return symbol.startswith(prefix_str[SymT.UNBACKED_INT])


def number_of(symbol: object) -> int:
    """Symbols of that kind are numbered as they are made."""
    return int(str(symbol).removeprefix(prefix_str[SymT.UNBACKED_INT]))


def symbol_of(number: object) -> sympy.Symbol | None:
    """The symbol that was made for a number, also where the trace has equated it with others since."""
    made = number.node._expr if isinstance(number, torch.SymInt) else None
    return made if isinstance(made, sympy.Symbol) else None
