"""What a trace believes of sizes known at run time only. The shape environment, which keeps it, has no public names."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import PurePath
from typing import Any
from weakref import WeakKeyDictionary

import sympy
import torch
from torch.utils._sympy.solve import try_solve

from graphcomp.compat.host_functions import function_of
from graphcomp.compat.relations import named, parsed
from graphcomp.compat.run_time_sizes import is_run_time_name, number_of

_own: Any = WeakKeyDictionary()
"""By shape environment: the relations that hold by what an operator does, or that it checks."""


@contextlib.contextmanager
def hold_by_themselves(environment: Any) -> Iterator[None]:
    """Within, relations come from what an operator does, or are checked by it: nobody has to be asked."""
    before = set(_assertions(environment))
    yield
    _own.setdefault(environment, set()).update(set(_assertions(environment)) - before)


def believe(relations: str, numbers: Sequence[Any], sizes: Sequence[Any]) -> None:
    """From here on a trace takes them to hold. Numbers and sizes are symbolic, or plain."""
    names = named(numbers, sizes)
    for holds, _, _ in parsed(relations):
        relation = function_of(holds, tuple(names), symbolic=True)(*names.values())
        torch._check(relation)
        if isinstance(relation, torch.SymBool) and _settles:
            _settle(relation.node.shape_env, relation.node._expr)


def rely_on(
    holds: Any,
    otherwise: Callable[[], str] = lambda: "sizes do not fit together",
    error: type[Exception] = RuntimeError,
) -> None:
    """Code needs a relation of sizes, symbolic or plain: it is checked where numbers are read, or by a guard.

    Raises `error` where it cannot hold.
    """
    torch._check_with(error, holds, otherwise)


_settles = True


@contextlib.contextmanager
def as_read() -> Iterator[None]:
    """Within, each number that is read keeps its symbol: Inductor writes code that gives it to a variable."""
    global _settles
    before, _settles = _settles, False
    try:
        yield
    finally:
        _settles = before


def _settle(environment: Any, relation: sympy.Basic) -> None:
    """Put an equation into effect for all sizes, also where torch would rather not, as it loses sight of a bound.

    Its last symbol is gone then.
    """
    symbols = [symbol for symbol in relation.free_symbols if is_run_time_name(str(symbol))]
    if not isinstance(relation, sympy.Eq) or environment.replace(relation) == sympy.true or not symbols:
        return
    last = max(symbols, key=number_of)
    solved = try_solve(relation, last)
    if solved is not None and last not in environment.replacements:
        environment.replacements[last] = environment.replace(solved[1])
        environment._replacements_version_counter += 1
        environment._update_version_counter()


def relied_on(mode: Any, is_user_file: Callable[[str], bool]) -> dict[sympy.Basic, str | None]:
    """What traced code needs of sizes known at run time only, beyond what always holds, with the line that does."""
    environment = mode.shape_env
    own = _own.get(environment, set())
    # Symbols of the batch may have become one since. Symbols that a relation equates have, too, and make it true.
    own = (own | set(map(environment.replace, own))) - {sympy.true}
    found: dict[sympy.Basic, str | None] = {}
    for relation, stack in _assertions(environment).items():
        _settle(environment, relation)
        if own.isdisjoint({relation, environment.replace(relation)}):
            frames = [f for f in stack.summary() if is_user_file(f.filename)]
            batch = [symbol for symbol in relation.free_symbols if not is_run_time_name(str(symbol))]
            relation = relation.xreplace({symbol: environment.replace(symbol) for symbol in batch})
            # Without its folder: ranks compare programs as text.
            found[relation] = f"{PurePath(frames[-1].filename).name}:{frames[-1].lineno}" if frames else None
    return found


def _assertions(environment: Any) -> dict[sympy.Basic, Any]:
    """What a trace relies on and no guard can check, each with where it was asked."""
    return {one.expr: one.stack for some in environment.deferred_runtime_asserts.values() for one in some}
