"""What sizes are taken for where memory and time are estimated: their values in the example microbatch, and guesses of
those known at run time only. The shape environment, which keeps both, has no public names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sympy
import torch

from graphcomp.compat.run_time_sizes import is_run_time_name, number_of

GUESS = 16
"""What a number may be in the example, where nothing tells."""


def hint(number: object) -> int:
    """The value a size had in the example microbatch; of one known at run time only, a guess."""
    if not isinstance(number, torch.SymInt):
        return int(number)  # type: ignore[call-overload]
    if number.node.hint is not None:
        return int(number.node.hint)
    environment: Any = number.node.shape_env
    guessed = {symbol: sympy.Integer(n) for symbol, n in environment.var_to_hint_override.items()}
    return max(0, int(number.node.expr.xreplace({**environment.backed_var_to_val, **guessed})))


def guess(number: torch.SymInt, about: object) -> None:
    """A new symbol may be about as large as another size."""
    number.node.shape_env.var_to_hint_override[number.node.expr] = hint(about)


def guesses(environment: Any) -> dict[sympy.Symbol, int]:
    """What stands for each symbol of the second kind in estimates."""
    return {s: int(n) for s, n in environment.var_to_hint_override.items() if is_run_time_name(str(s))}


def adopt_guesses(environment: Any, found: Mapping[sympy.Symbol, int]) -> None:
    """In a new shape environment; symbols it makes from now on are others."""
    environment.var_to_hint_override.update(found)
    environment.unbacked_symint_counter = max(
        (number_of(symbol) + 1 for symbol in found), default=environment.unbacked_symint_counter
    )
