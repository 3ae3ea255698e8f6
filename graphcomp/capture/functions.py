"""Where a training step enters the user's code: forwards, the loss function, and the methods that they call by name.

Python cannot say which function `self.scale()` will be, nor whose `rate` is read by `settings.rate`. So every name that
a reached function uses is looked up in all classes, objects and Python modules that take part: a function found so is
reached too, an object takes part itself, and a plain value is watched.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FunctionType, ModuleType
from typing import Any

from torch import nn

from graphcomp.capture.userfiles import is_user_file
from graphcomp.capture.values import DEPTH, LIMIT
from graphcomp.capture.variables import WATCHED, Attributes, Variable, item, names_in, plain_function, variables
from graphcomp.compat import modules as internals

__all__ = ["entry_points", "hook_entries", "item", "plain_function", "variables"]

Entry = tuple[Any, str]
"""A function, or attributes in its place, and the name that messages give it."""


def entry_points(model: nn.Module, loss_fn: Callable[..., Any] | None) -> Iterator[Entry]:
    """All that a training step enters or reads by name, in an order that depends on the code alone."""
    kinds = dict.fromkeys(type(module) for module in model.modules())
    roots: list[Entry] = [(kind.forward, f"{kind.__name__}.forward") for kind in kinds]
    for name, module in model.named_modules():
        if "forward" in vars(module):
            roots.append((vars(module)["forward"], f"{name}.forward".lstrip(".")))
    roots += hook_entries(model)
    walk = _Walk({id(module) for module in model.modules()})
    for kind in kinds:
        walk.add_class(kind)
    for module in model.modules():
        for key, value in vars(module).items():
            if key not in internals.INTERNAL:
                walk.add_held(value, key, whole=True)
    if loss_fn is not None:
        called = loss_fn if plain_function(loss_fn) else vars(type(loss_fn)).get("__call__")
        roots.append((called, getattr(loss_fn, "__name__", "loss_fn")))
        walk.add_object(_owner(loss_fn))
    yield from roots
    yield from walk.follow(roots)


def hook_entries(model: nn.Module) -> Iterator[Entry]:
    """Hooks of modules and of parameters, which run while tracing."""
    for name, module in model.named_modules():
        for kind in internals.HOOKS:
            for hook in internals.hooks(module, kind):
                yield hook, f"{name} {kind}".lstrip()
    for name, parameter in model.named_parameters():
        for hook in (internals.hooks_of(parameter) or {}).values():
            yield hook, f"{name} gradient hook"


def _owner(function: Any) -> Any:
    """The object behind a bound method; a callable object itself; None for a plain function."""
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__self__", None if isinstance(function, FunctionType) else function)


@dataclass
class _Walk:
    """Follows names. own: ids of the modules that are watched anyway; pending: functions still to be looked at.

    objects: those whose attributes are looked up, Python modules among them, by their ids; whole: the ids of those that
    are watched with all of their attributes by who holds them.
    """

    own: set[int]
    classes: dict[type, None] = field(default_factory=dict)
    objects: dict[int, Any] = field(default_factory=dict)
    whole: set[int] = field(default_factory=set)
    modules: list[Entry] = field(default_factory=list)
    names: dict[str, None] = field(default_factory=dict)
    pending: list[Entry] = field(default_factory=list)

    def add_class(self, kind: type) -> None:
        """Look names up in a class and its bases, as far as they are the user's."""
        for one in kind.__mro__:
            source = getattr(sys.modules.get(one.__module__), "__file__", None) or "typed in"
            if one not in self.classes and one.__module__ != "builtins" and is_user_file(source):
                self.classes[one] = None
                self.pending += [found for name in self.names for found in _methods(one, name)]

    def add_object(self, value: Any) -> None:
        """Look names up in an object too, such as the trainer whose method the loss function is."""
        if isinstance(value, nn.Module):
            self.add_module(value, type(value).__name__)
        elif isinstance(value, type):
            self.add_class(value)
        elif value is not None:
            self.add_class(type(value))
            self._add_attributes(value)

    def add_held(self, value: Any, name: str, depth: int = 0, whole: bool = False) -> None:
        """What a variable or an attribute of this name holds, if names may be looked up in it.

        whole: all attributes of an object are watched anyway.
        """
        if type(value) in (list, tuple, dict):
            if depth < DEPTH and len(value) <= LIMIT:
                for held in value.values() if isinstance(value, dict) else value:
                    self.add_held(held, name, depth + 1)
        elif isinstance(value, nn.Module):
            self.add_module(value, name)
        elif isinstance(value, type):
            self.add_class(value)
        elif isinstance(value, ModuleType):
            if _is_users(value.__name__):
                self._add_attributes(value)
        elif (function := plain_function(value)) is not None:
            if is_user_file(function.__code__.co_filename):
                self.pending.append((value, name))
        elif _is_users(type(value).__module__, *_NAMESPACES):
            if whole:
                self.whole.add(id(value))
            self.add_class(type(value))
            self._add_attributes(value)

    def _add_attributes(self, value: Any) -> None:
        if id(value) not in self.objects and hasattr(value, "__dict__"):
            self.objects[id(value)] = value
            for name in self.names:
                self._look_up(value, name)

    def _look_up(self, value: Any, name: str) -> None:
        """An attribute that an object itself holds."""
        held = vars(value).get(name)
        if held is not None:
            self.add_held(held, f"{_name_of(value)}.{name}", whole=id(value) not in self.whole)

    def add_module(self, module: nn.Module, name: str) -> None:
        """All of a module that is no part of the model, such as a criterion or a teacher in a closure."""
        for path, one in module.named_modules():
            if id(one) not in self.own:
                self.own.add(id(one))
                self.add_class(type(one))
                full = f"{name}.{path}".rstrip(".")
                plain = [key for key in vars(one) if key not in internals.INTERNAL]
                found = list(_read(vars(one), plain, full, "object attribute"))
                for table in internals.tables(one):
                    found += _read(table, table, full, "object attribute")
                self.modules.append((Attributes(tuple(found)), full))
                self.pending.append((type(one).forward, f"{type(one).__name__}.forward"))

    def follow(self, roots: Sequence[Entry]) -> Iterator[Entry]:
        """What the roots reach by name."""
        seen: set[int] = set()
        given = {id(plain_function(function)) for function, _ in roots}
        self.pending = [*roots, *self.pending]
        while self.pending:
            function, name = self.pending.pop(0)
            if id(plain_function(function)) not in given:
                given.add(id(plain_function(function)))
                yield function, name
            self._look(function, name, seen)
        for kind in self.classes:
            plain = [key for key in self.names if key in vars(kind) and not list(_methods(kind, key))]
            yield Attributes(tuple(_read(vars(kind), plain, kind.__name__, "class attribute"))), kind.__name__
        for value in self.objects.values():
            named = [key for key in self.names if key in vars(value) or _hides(value, key)]
            owner, watched = _name_of(value), WATCHED if id(value) in self.whole else "object attribute"
            yield Attributes(tuple(_read(vars(value), named, owner, watched))), owner
        yield from self.modules

    def _look(self, function: Any, name: str, seen: set[int]) -> None:
        """Take up the names in a function, and in those that it reaches through its variables."""
        self._take_names(function)
        for variable in variables(function, name, seen):
            try:
                value = variable.read()
            except (ValueError, LookupError):  # a cell that is not filled yet
                continue
            self._take_names(value)
            if plain_function(value) is None:  # its own variables come with it
                self.add_held(value, f"{variable.function}.{variable.name}", whole=variable.kind != "global")

    def _take_names(self, function: Any) -> None:
        plain = plain_function(function)
        if plain is None or not is_user_file(plain.__code__.co_filename):
            return
        for name in names_in(plain.__code__):
            if name not in self.names:
                self.names[name] = None
                self.pending += [found for kind in self.classes for found in _methods(kind, name)]
                for value in list(self.objects.values()):
                    self._look_up(value, name)


_NAMESPACES = ("types", "argparse")
"""Modules of the standard library whose objects hold what users put into them."""


def _is_users(module: str, *more: str) -> bool:
    """Whether a Python module, by its name, is neither the interpreter's, nor torch's, nor this package's."""
    if module in more:
        return True
    source = getattr(sys.modules.get(module), "__file__", None) or "typed in"
    return module.partition(".")[0] not in sys.stdlib_module_names and is_user_file(source)


def _name_of(value: Any) -> str:
    return str(value.__name__) if isinstance(value, ModuleType) else type(value).__name__


def _hides(value: Any, name: str) -> bool:
    """Whether an attribute that the object does not have now would hide one of its class."""
    found = next((vars(kind)[name] for kind in type(value).__mro__ if name in vars(kind)), None)
    return not (found is None or name.startswith("__") or hasattr(found, "__get__"))


def _methods(kind: type, name: str) -> Iterator[Entry]:
    """The function behind an entry of a class, if it is one: a method or a property."""
    value = vars(kind).get(name)
    if isinstance(value, property):
        value = value.fget
    elif isinstance(value, functools.cached_property):
        value = value.func
    found = plain_function(value)
    if found is not None:
        yield found, f"{kind.__name__}.{name}"


def _read(table: Mapping[Any, Any], names: Iterable[Any], owner: str, kind: str) -> Iterator[Variable]:
    for name in names:
        yield Variable(kind, str(name), owner, item(table, name))
