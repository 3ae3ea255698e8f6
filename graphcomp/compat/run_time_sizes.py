"""Sizes known at run time only: the operators that read them on the host, and what stands for them while tracing.

`read_numbers(numbers)` yields the elements of an integer tensor as numbers; `read_sum(numbers)` their sum, of a mask
how many are true; `exchange_splits(sent, received, rows)` how many rows an exact exchange brings, then how many go to
each rank, then how many come from each. Real tensors are read in one host synchronisation. Of fake ones nobody knows
the contents, so their numbers are symbols of a second kind ("unbacked"), which no input of a program shows. The public
way to make those is a switch of the shape environment, which would let operators through that wait for the device
without being counted.

A sum is an operator of its own so that what is added up is a tensor in memory, the one that places are found in: a
compiler that computed it twice, in two loops, could round it two ways.

All take facts: relations between the numbers they yield (`n0`, `n1`, ...) and others that they are given (`s0`, ...),
one a line: the relation, how it reads, the line of code that needs it. A tracer believes them; a run checks them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any
from weakref import WeakKeyDictionary

import sympy
import torch
from torch._ops import OpOverload
from torch.fx import has_side_effect
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils._sympy.solve import try_solve
from torch.utils._sympy.symbol import SymT, prefix_str
from torch.utils.weak import WeakIdKeyDictionary

from graphcomp.compat.host_functions import function_of
from graphcomp.errors import CollectiveError, GuardError

_LIBRARY = torch.library.Library("graphcomp", "DEF")
_FACTS = "SymInt[] sizes=[], str facts=''"
_LIBRARY.define(f"exchange_splits(Tensor sent, Tensor received, SymInt rows, {_FACTS}) -> SymInt[]")
_LIBRARY.define(f"read_numbers(Tensor numbers, {_FACTS}) -> SymInt[]")
_LIBRARY.define(f"read_sum(Tensor numbers, {_FACTS}) -> SymInt[]")
EXCHANGE_SPLITS: OpOverload = torch.ops.graphcomp.exchange_splits.default
"""(sent, received, rows): the rows that come, how many go to each rank, how many come from each. sent sums to rows"""
READ_NUMBERS: OpOverload = torch.ops.graphcomp.read_numbers.default
"""(numbers): the elements of an integer tensor whose own size is a plain number, in order"""
READ_SUM: OpOverload = torch.ops.graphcomp.read_sum.default
"""(numbers): the sum of all elements of a tensor of integers or bools, alone in a list"""
READS = (EXCHANGE_SPLITS, READ_NUMBERS, READ_SUM)
for _read_only in (READ_NUMBERS, READ_SUM):
    has_side_effect(_read_only)  # it checks

Numbers = list[Any]
_syncs = 0


def host_syncs() -> int:
    """How often this process has read numbers out of tensors, such as splits: each time it waited for the device."""
    return _syncs


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


def _number_of(symbol: object) -> int:
    """Symbols of that kind are numbered as they are made."""
    return int(str(symbol).removeprefix(prefix_str[SymT.UNBACKED_INT]))


def _read(sent: torch.Tensor, received: torch.Tensor, rows: int, sizes: Sequence[int] = (), facts: str = "") -> Numbers:
    global _syncs
    _syncs += 1
    given, out = torch.stack([sent.to(torch.int64), received.to(sent.device, torch.int64)]).tolist()
    if min(*given, *out) < 0:
        raise _wrong("a split is negative", "whole numbers from 0", f"{given} and {out}")
    if sum(given) != rows:
        raise _wrong("input_splits do not add up to the rows there are", f"a sum of {rows}", given)
    return _checked([sum(out), *given, *out], sizes, facts)


def _read_numbers(numbers: torch.Tensor, sizes: Sequence[int] = (), facts: str = "") -> Numbers:
    global _syncs
    _syncs += 1
    return _checked(numbers.reshape(-1).tolist(), sizes, facts)


def _read_sum(numbers: torch.Tensor, sizes: Sequence[int] = (), facts: str = "") -> Numbers:
    return _read_numbers(numbers.sum(), sizes, facts)


def _checked(numbers: Numbers, sizes: Sequence[int], facts: str) -> Numbers:
    names = _names(numbers, sizes)
    for relation, readable, line in map(_parts_of, facts.splitlines()):
        if not function_of(relation, tuple(names))(*names.values()):
            raise GuardError(
                "sizes that are known when the program runs do not fit together",
                where=line,
                expected=readable or relation,
                got=", ".join(f"{name} = {number}" for name, number in names.items() if name in relation),
                do=_NOT_ONE if "!= 1" in relation else _FITS,
            )
    return numbers


_FITS = (
    "see what the code at this line needs; eager PyTorch fails there too, unless it broadcasts one row"
    ", or counts a negative place from the end"
)
_NOT_ONE = (
    "eager PyTorch drops a dimension of one row there (name another one, as in .squeeze(1), or use .flatten()), or its "
    "gradient of std and var is nan (give correction=0)"
)


def _names(numbers: Sequence[Any], sizes: Sequence[Any]) -> dict[str, Any]:
    return {f"n{i}": n for i, n in enumerate(numbers)} | {f"s{i}": size for i, size in enumerate(sizes)}


def _parts_of(fact: str) -> tuple[str, str | None, str | None]:
    relation, readable, line = (*fact.split("\t"), "", "")[:3]
    return relation, readable or None, line or None


def _wrong(what: str, expected: object, got: object) -> CollectiveError:
    return CollectiveError(what, where="collectives.all_to_all", expected=expected, got=got)


_known: Any = None
"""While something is captured, by fake tensor: how often it was written to, and what stands for its contents."""


@contextlib.contextmanager
def knowing_splits() -> Iterator[None]:
    """Within, the same splits stand for the same numbers wherever they are read, so rows sent back are as many as came.

    Elsewhere each call makes its own symbols, which is what runs a node anew expects of it.
    """
    global _known
    before, _known = _known, WeakIdKeyDictionary()
    try:
        yield
    finally:
        _known = before


_GUESS = 16
"""What a number may be in the example, where nothing tells."""


def _stand_for_numbers(numbers: torch.Tensor, sizes: Sequence[Any] = (), facts: str = "") -> Numbers:
    """A symbol for each element, about which the facts hold."""
    return _stand_for_some(int(numbers.numel()), sizes, facts)


def _stand_for_sum(numbers: torch.Tensor, sizes: Sequence[Any] = (), facts: str = "") -> Numbers:
    return _stand_for_some(1, sizes, facts)


def _stand_for_some(count: int, sizes: Sequence[Any], facts: str) -> Numbers:
    environment = torch.library.get_ctx()._shape_env
    with _holds_by_itself(environment):
        found = [environment.create_unbacked_symint() for _ in range(count)]
        for number in found:
            environment.var_to_hint_override[number.node.expr] = hint(sizes[0] if sizes else _GUESS)
        _believe(found, sizes, facts)
    # A number that turns out to be another one already is nobody's to give.
    fresh = environment.pending_fresh_unbacked_symbols
    fresh[:] = [symbol for symbol in fresh if environment.replace(symbol) == symbol]
    return found


def _believe(numbers: Numbers, sizes: Sequence[Any], facts: str) -> None:
    for relation, _, _ in map(_parts_of, facts.splitlines()):
        names = _names(numbers, sizes)
        holds = function_of(relation, tuple(names), symbolic=True)(*names.values())
        torch._check(holds)
        if isinstance(holds, torch.SymBool) and _settles:
            settle(holds.node.shape_env, holds.node._expr)


@contextlib.contextmanager
def _holds_by_itself(environment: Any) -> Iterator[None]:
    """Within, relations come from what an operator does, or are checked by it: nobody has to be asked."""
    before = set(_assertions(environment))
    yield
    _own.setdefault(environment, set()).update(set(_assertions(environment)) - before)


def _stand_for(
    sent: torch.Tensor, received: torch.Tensor, rows: Any, sizes: Sequence[Any] = (), facts: str = ""
) -> Numbers:
    """Symbols, or what is known. The last split is what the others leave, so that sums are the numbers of rows."""
    environment = torch.library.get_ctx()._shape_env
    with _holds_by_itself(environment):
        numbers = _numbers_for(environment, sent, received, rows)
        _believe(numbers, sizes, facts)
    return numbers


def _numbers_for(environment: Any, sent: torch.Tensor, received: torch.Tensor, rows: Any) -> Numbers:
    out = _remembered(received)
    if out is None:
        total = _fresh(environment, rows)
        out = _parts(environment, received, total)
    given = _remembered(sent)
    if given is None or not statically_known_true(sum(given) == rows):
        given = _parts(environment, sent, rows)
    return [sum(out), *given, *out]


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


def settle(environment: Any, relation: sympy.Basic) -> None:
    """Put an equation into effect for all sizes, also where torch would rather not, as it loses sight of a bound.

    Its last symbol is gone then.
    """
    symbols = [symbol for symbol in relation.free_symbols if is_run_time_name(str(symbol))]
    if not isinstance(relation, sympy.Eq) or environment.replace(relation) == sympy.true or not symbols:
        return
    last = max(symbols, key=_number_of)
    solved = try_solve(relation, last)
    if solved is not None and last not in environment.replacements:
        environment.replacements[last] = environment.replace(solved[1])
        environment._replacements_version_counter += 1
        environment._update_version_counter()


_own: Any = WeakKeyDictionary()
"""By shape environment: the relations that hold by what the operator does."""


def _assertions(environment: Any) -> dict[sympy.Basic, Any]:
    """What a trace relies on and no guard can check, each with where it was asked."""
    return {one.expr: one.stack for some in environment.deferred_runtime_asserts.values() for one in some}


def relied_on(mode: Any, is_user_file: Callable[[str], bool]) -> dict[sympy.Basic, str | None]:
    """What traced code needs of sizes known at run time only, beyond what always holds, with the line that does."""
    environment = mode.shape_env
    own = _own.get(environment, set())
    # Symbols of the batch may have become one since. Symbols that a relation equates have, too, and make it true.
    own = (own | set(map(environment.replace, own))) - {sympy.true}
    found: dict[sympy.Basic, str | None] = {}
    for relation, stack in _assertions(environment).items():
        settle(environment, relation)
        if own.isdisjoint({relation, environment.replace(relation)}):
            frames = [f for f in stack.summary() if is_user_file(f.filename)]
            batch = [symbol for symbol in relation.free_symbols if not is_run_time_name(str(symbol))]
            relation = relation.xreplace({symbol: environment.replace(symbol) for symbol in batch})
            # Without its folder: ranks compare programs as text.
            found[relation] = f"{PurePath(frames[-1].filename).name}:{frames[-1].lineno}" if frames else None
    return found


def symbol_of(number: object) -> sympy.Symbol | None:
    """The symbol that was made for a number, also where the trace has equated it with others since."""
    made = number.node._expr if isinstance(number, torch.SymInt) else None
    return made if isinstance(made, sympy.Symbol) else None


def _remembered(splits: torch.Tensor) -> Numbers | None:
    version, numbers = (None, None) if _known is None else _known.get(splits, (None, None))
    return numbers if version == splits._version else None


def _parts(environment: Any, splits: torch.Tensor, total: Any) -> Numbers:
    size = int(splits.shape[0])
    nothing = isinstance(total, int) and total == 0  # symbols of one possible value would be gone at once
    parts = [0 if nothing else _fresh(environment, total // size) for _ in range(size - 1)]
    parts.append(total - sum(parts))
    torch._check(parts[-1] >= 0)
    if _known is not None:
        _known[splits] = splits._version, parts
    return parts


def _fresh(environment: Any, about: Any) -> torch.SymInt:
    """A number from 0 on. about: what it may be in the example, for estimates."""
    number: torch.SymInt = environment.create_unbacked_symint()
    torch._check(number >= 0)
    environment.var_to_hint_override[number.node.expr] = hint(about)
    return number


def hint(number: object) -> int:
    """The value a size had in the example microbatch; of one known at run time only, a guess."""
    if not isinstance(number, torch.SymInt):
        return int(number)  # type: ignore[call-overload]
    if number.node.hint is not None:
        return int(number.node.hint)
    environment: Any = number.node.shape_env
    guessed = {symbol: sympy.Integer(n) for symbol, n in environment.var_to_hint_override.items()}
    return max(0, int(number.node.expr.xreplace({**environment.backed_var_to_val, **guessed})))


def unnoted(mode: Any) -> contextlib.AbstractContextManager[None]:
    """Within, new symbols are not expected to be taken note of, as a tracer does."""
    found: contextlib.AbstractContextManager[None] = mode.shape_env.ignore_fresh_unbacked_symbols()
    return found


def guesses(environment: Any) -> dict[sympy.Symbol, int]:
    """What stands for each symbol of the second kind in estimates."""
    return {s: int(n) for s, n in environment.var_to_hint_override.items() if is_run_time_name(str(s))}


def adopt_guesses(environment: Any, found: Mapping[sympy.Symbol, int]) -> None:
    """In a new shape environment; symbols it makes from now on are others."""
    environment.var_to_hint_override.update(found)
    environment.unbacked_symint_counter = max(
        (_number_of(symbol) + 1 for symbol in found), default=environment.unbacked_symint_counter
    )


_LIBRARY.impl("exchange_splits", _read, "CompositeExplicitAutograd")
_LIBRARY.impl("read_numbers", _read_numbers, "CompositeExplicitAutograd")
_LIBRARY.impl("read_sum", _read_sum, "CompositeExplicitAutograd")
torch.library.register_fake("graphcomp::exchange_splits", _stand_for, lib=_LIBRARY)
torch.library.register_fake("graphcomp::read_numbers", _stand_for_numbers, lib=_LIBRARY)
torch.library.register_fake("graphcomp::read_sum", _stand_for_sum, lib=_LIBRARY)

__all__ = [
    "EXCHANGE_SPLITS",
    "READS",
    "READ_NUMBERS",
    "READ_SUM",
    "adopt_guesses",
    "as_read",
    "guesses",
    "hint",
    "host_syncs",
    "is_run_time",
    "is_run_time_name",
    "knowing_splits",
    "relied_on",
    "symbol_of",
    "unnoted",
]
