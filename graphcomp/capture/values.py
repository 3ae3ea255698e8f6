"""Plain values: what of an attribute or variable a program may depend on, in a form that can be kept and compared."""

from __future__ import annotations

import enum
import functools
from dataclasses import dataclass, field
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

LIMIT = 256
"""Elements of a container that are followed; a longer one counts as one object."""
DEPTH = 4

_ATOMS = (str, bytes, bool, int, complex, type(None), torch.dtype, torch.device, torch.Size, torch.layout)


@dataclass(frozen=True)
class Frozen:
    """A value as it was: its type, contents that compare, and the text that messages show."""

    kind: str
    contents: Any
    text: str = field(compare=False, hash=False)


@dataclass(frozen=True)
class Same:
    """Stands for an object whose contents are not followed: equal only to itself, which it keeps alive."""

    object: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.object is self.object

    def __hash__(self) -> int:
        return id(self.object)


class Watched:
    """The mutable containers that were met while values were frozen: all that may change behind an unchanged object."""

    def __init__(self) -> None:
        self._by_id: dict[int, Any] = {}

    def add(self, container: Any) -> None:
        self._by_id[id(container)] = container

    @property
    def containers(self) -> list[Any]:
        """Each once, however many hold it; of a dict, its keys apart from its values."""
        found: list[Any] = []
        for container in self._by_id.values():
            found += [container.keys(), container] if isinstance(container, dict) else [container]
        return found


def freeze(value: Any, watched: Watched, *, objects: bool = True, depth: int = 0) -> Frozen:
    """The plain contents of a value.

    Numbers, strings, None, enums, dtypes, and lists, tuples, dicts and sets of those count by value; so do functions
    (their code) and, with `objects`, the attributes of other objects, one level deep, such as those of a config. Of a
    tensor only counts that it is one. Everything else is the same only as itself; so are Python modules, of which names
    that a user's code reads are followed where they are found.
    """
    kind = type(value).__qualname__
    if isinstance(value, enum.Enum):
        return Frozen(kind, (type(value), value.name), str(value))
    if isinstance(value, _ATOMS):
        return Frozen(kind, value, _brief(value))
    if isinstance(value, float):
        return Frozen(kind, repr(value), repr(value))  # the text tells 0.0 from -0.0, and nan equals nan
    if isinstance(value, torch.Tensor):
        return Frozen("tensor", None, "a tensor")
    if depth < DEPTH and not isinstance(value, nn.Module | ModuleType | type):
        inside = functools.partial(freeze, watched=watched, objects=False, depth=depth + 1)
        if isinstance(value, list | tuple | set | frozenset) and len(value) <= LIMIT:
            if not isinstance(value, tuple | frozenset):
                watched.add(value)
            items = tuple(map(inside, value))
            return Frozen(kind, items if isinstance(value, list | tuple) else frozenset(items), _brief(value))
        if isinstance(value, dict) and len(value) <= LIMIT:
            watched.add(value)
            return Frozen(kind, tuple((inside(key), inside(item)) for key, item in value.items()), _brief(value))
        if isinstance(value, FunctionType):
            return Frozen("function", (value.__module__, value.__qualname__, value.__code__), value.__qualname__)
        if isinstance(value, MethodType):
            owner = Same(value.__self__)
            return Frozen("method", (inside(value.__func__), owner), value.__func__.__qualname__)
        if isinstance(value, functools.partial):
            parts = (value.func, value.args, value.keywords)
            return Frozen("partial", tuple(map(inside, parts)), _brief(value))
        if objects and hasattr(value, "__dict__") and len(vars(value)) <= LIMIT:
            watched.add(vars(value))
            contents = tuple((name, inside(item)) for name, item in vars(value).items())
            return Frozen(kind, (type(value), contents), f"a {type(value).__name__}")
    return Frozen(kind, Same(value), f"this {type(value).__name__}" if not isinstance(value, type) else kind)


def inner_difference(old: Frozen, new: Frozen) -> tuple[str, Frozen | None, Frozen | None] | None:
    """The first attribute of an object, or entry of a dict, that differs: where (as ".name" or "[key]"), was, is."""
    if old.kind != new.kind or not isinstance(old.contents, tuple) or not isinstance(new.contents, tuple):
        return None
    is_object = len(old.contents) == len(new.contents) == 2 and isinstance(old.contents[0], type)
    first, second = (old.contents[1], new.contents[1]) if is_object else (old.contents, new.contents)
    try:
        before, after = dict(first), dict(second)
    except (TypeError, ValueError):
        return None
    for name in dict.fromkeys((*before, *after)):
        if before.get(name) != after.get(name):
            return f".{name}" if is_object else f"[{name.text}]", before.get(name), after.get(name)
    return None


def _brief(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
