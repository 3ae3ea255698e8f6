"""What a Python function can reach besides its arguments: closure cells, defaults, and the globals that it names."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import CellType, CodeType, FunctionType
from typing import Any

from graphcomp.capture.userfiles import is_user_file
from graphcomp.compat.closures import uncompiled

WATCHED = "watched attribute"
"""The kind of an attribute of an object that is watched with all of its attributes by who holds it."""


@dataclass(frozen=True)
class Variable:
    """A variable that a function reads; `read` raises ValueError or LookupError if it is unset.

    kind: "closure variable", "default", "global", "class attribute", "object attribute" or `WATCHED`.
    """

    kind: str
    name: str
    function: str
    read: Callable[[], Any]


@dataclass(frozen=True)
class Attributes:
    """Attributes of classes, objects or modules that user code reads; stands in the place of a function."""

    variables: tuple[Variable, ...]


def item(container: Mapping[Any, Any] | Sequence[Any], key: Any) -> Callable[[], Any]:
    return functools.partial(container.__getitem__, key)


def held_in(variable: Variable) -> tuple[Any, Any]:
    """The dict that an `item` reads, and the key; otherwise None and None."""
    read: Any = variable.read
    table = getattr(getattr(read, "func", None), "__self__", None)
    return (table, read.args[0]) if isinstance(table, Mapping) else (None, None)


def contents(cell: CellType) -> Callable[[], Any]:
    return functools.partial(getattr, cell, "cell_contents")


def _default(function: FunctionType, argument: int | str) -> Any:
    """Read through the function, whose tables of defaults may be replaced. A number counts from the first default."""
    if isinstance(argument, str):
        return (function.__kwdefaults__ or {})[argument]
    return (function.__defaults__ or ())[argument]


def plain_function(value: Any) -> FunctionType | None:
    """The Python function behind a method, a partial, a compiled function or a function; None for anything else."""
    while True:
        if isinstance(value, functools.partial):
            value = value.func
        elif hasattr(value, "__func__"):
            value = value.__func__
        elif uncompiled(value) is not None:
            value = uncompiled(value)
        else:
            return value if isinstance(value, FunctionType) else None


def names_in(code: CodeType) -> dict[str, None]:
    """The names that a function's code uses as globals and attributes, those of its inner functions included."""
    inner = [const for const in code.co_consts if isinstance(const, CodeType)]
    return dict.fromkeys((*code.co_names, *(name for one in inner for name in names_in(one))))


def variables(function: Any, name: str, seen: set[int]) -> Iterator[Variable]:
    """The variables of a function and of the user's functions that it reaches through them, each function once.

    name: what the function is called in messages. Functions of torch and of the interpreter are not entered.
    """
    if isinstance(function, Attributes):
        for attribute in function.variables:
            yield attribute
            with contextlib.suppress(LookupError):  # one that is not there now
                yield from variables(attribute.read(), attribute.name, seen)
        return
    plain = plain_function(function)
    if plain is None or id(plain) in seen or not is_user_file(plain.__code__.co_filename):
        return
    seen.add(id(plain))
    found = [
        Variable("closure variable", variable, name, contents(cell))
        for variable, cell in zip(plain.__code__.co_freevars, plain.__closure__ or (), strict=True)
    ]
    defaults = plain.__defaults__ or ()
    count = plain.__code__.co_argcount
    arguments = plain.__code__.co_varnames[count - len(defaults) : count]
    found += [Variable("default", a, name, functools.partial(_default, plain, i)) for i, a in enumerate(arguments)]
    found += [Variable("default", a, name, functools.partial(_default, plain, a)) for a in plain.__kwdefaults__ or ()]
    found += [
        Variable("global", variable, name, item(plain.__globals__, variable))
        for variable in names_in(plain.__code__)
        if variable in plain.__globals__
    ]
    for variable in found:
        yield variable
        try:
            value = variable.read()
        except (ValueError, LookupError):  # a cell that is not filled yet
            continue
        yield from variables(value, variable.name, seen)
