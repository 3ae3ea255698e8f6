"""Facts as text, alike in every process: what a program that was written to a file was captured under."""

from __future__ import annotations

import enum
import functools
import hashlib
import pickle
from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from graphcomp.capture.facts import Facts
from graphcomp.capture.values import Frozen, Same

DEPTH = 6
LIMIT = 256
PASSING = ("mode", "setting")
"""Kinds of facts that change while a program runs: modules' modes, autocast and the like."""

Subject = tuple[str, str, str]


def spelled(facts: Facts) -> dict[Subject, str]:
    """By subject. An object that was not followed is spelled by its class and its attributes, as far as they go."""
    return {subject: _spell(value, DEPTH) for subject, value in facts.facts.items()}


def difference(old: dict[Subject, str], new: dict[Subject, str], kinds: Callable[[str], bool]) -> list[str]:
    """What differs among facts of these kinds, a line each, old and new."""
    found = []
    for subject in dict.fromkeys((*old, *new)):
        was, now = (facts.get(subject, "nothing") for facts in (old, new))
        if was != now and kinds(subject[0]):
            found.append(f"{_place(subject)}: {_first_difference(was, now)}")
    return found


def lines(facts: Facts, kinds: Callable[[str], bool]) -> list[str]:
    """A line for each fact of these kinds."""
    return [f"{_place(subject)}: {text}" for subject, text in spelled(facts).items() if kinds(subject[0])]


def _place(subject: Subject) -> str:
    kind, owner, name = subject
    if kind == "mode":
        return f"training mode of module '{owner}'" if owner else "training mode of the model"
    return f"{kind} '{name}'" + (f" of '{owner}'" if owner else "")


def _first_difference(was: str, now: str) -> str:
    if max(len(was), len(now)) <= 80 or "nothing" in (was, now):
        return f"was {_brief(was)}, is {_brief(now)}"
    place = next((i for i, (a, b) in enumerate(zip(was, now, strict=False)) if a != b), min(len(was), len(now)))
    start = max(0, place - 20)
    return f"was ...{was[start : start + 60]}..., is ...{now[start : start + 60]}..."


def _brief(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:80]}..."


def _spell(value: Any, depth: int) -> str:
    match value:
        case Frozen():
            return f"{value.kind} {_spell(value.contents, depth)}"
        case Same():
            return _spell(value.object, depth)
        case CodeType():
            return f"code {_code(value)}"
        case enum.Enum():
            return f"{_name(type(value))}.{value.name}"
        case FunctionType():
            return f"function {_name(value)} {_code(value.__code__)}"
        case MethodType():
            return f"method {_spell(value.__func__, depth)} of {_spell(value.__self__, depth - 1)}"
        case type() | BuiltinFunctionType():
            return _name(value)
        case ModuleType():
            return f"module {value.__name__}"
        case torch.Tensor():
            return f"tensor {value.dtype} {tuple(value.shape)}"
        case float() | int() | str() | complex() | None | torch.dtype() | torch.device() | torch.layout():
            return repr(value)
        case bytes():
            return repr(value) if len(value) <= 80 else f"bytes {hashlib.sha256(value).hexdigest()[:16]}"
    return _compound(value, depth)


def _compound(value: Any, depth: int) -> str:
    kind = "" if type(value) in (dict, set, frozenset, list, tuple) else _name(type(value))
    fixed = isinstance(value, tuple | frozenset)  # which cannot hold themselves, and so count as no level
    if depth <= 0 and not fixed:
        return f"a {_name(type(value))}"
    inside = depth if fixed else depth - 1
    if isinstance(value, dict):
        return f"{kind}{{{_joined(f'{_spell(k, inside)}: {_spell(v, inside)}' for k, v in _some(value.items()))}}}"
    if isinstance(value, set | frozenset):
        return f"{kind}{{{_joined(sorted(_spell(each, inside) for each in value))}}}"
    if isinstance(value, list | tuple):
        return f"{kind}({_joined(_spell(each, inside) for each in _some(value))})"
    if is_dataclass(value):
        return f"{kind}({_joined(f'{f.name}={_spell(getattr(value, f.name), inside)}' for f in fields(value))})"
    if isinstance(value, nn.Module):  # one of the model's, of which all is a fact of its own; or code, by its class
        return f"a {kind}"
    attributes = getattr(value, "__dict__", None)
    if isinstance(attributes, dict) and not isinstance(value, functools.partial):
        return f"{kind}({_joined(f'{k}={_spell(v, inside)}' for k, v in _some(sorted(attributes.items())))})"
    parts = _parts(value)
    return f"a {kind}" if parts is None else f"{kind} made by {_spell(parts, inside)}"


def _parts(value: Any) -> tuple[Any, ...] | None:
    """What an object without attributes, such as a number of NumPy, is made anew of; None where nobody can tell.

    Objects of torch that are not spelled by now hold what may differ in every process: a generator its state.
    """
    if type(value).__module__.partition(".")[0] == "torch":
        return None
    try:
        made = value.__reduce_ex__(pickle.DEFAULT_PROTOCOL)
    except Exception:  # whatever its class raises where it cannot be pickled
        return None
    return made[:3] if isinstance(made, tuple) else (made,)


def _some(items: Iterable[Any]) -> list[Any]:
    return list(items)[:LIMIT]


def _joined(parts: Iterable[str]) -> str:
    return ", ".join(parts)


def _name(value: Any) -> str:
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", type(value).__name__)
    return str(name) if module in (None, "builtins") else f"{module}.{name}"


def _code(code: CodeType) -> str:
    """What a function does, wherever its file is and whatever the line."""
    seen = hashlib.sha256()

    def add(part: CodeType) -> None:
        seen.update(part.co_code)
        for names in (part.co_names, part.co_varnames, part.co_freevars, part.co_cellvars):
            seen.update(repr(names).encode())
        for constant in part.co_consts:
            if isinstance(constant, CodeType):
                add(constant)
            elif isinstance(constant, frozenset):
                seen.update(repr(sorted(map(repr, constant))).encode())
            else:
                seen.update(repr(constant).encode())

    add(code)
    return seen.hexdigest()[:16]
