"""What differs: between the texts of two programs, and between the values of two executions."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import torch
from torch.fx import Node

from graphcomp.ir import meta, printer
from graphcomp.ir.interp import trace_values
from graphcomp.ir.program import Program
from graphcomp.ir.signature import Role

_NAME = re.compile(r"%[A-Za-z_]\w*")
aten = torch.ops.aten
_UNINITIALISED = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided}
_BLANKS = re.compile(r" {2,}(?=#)")


def diff(a: str, b: str, before: str = "before", after: str = "after") -> str:
    """A unified diff of two program texts; empty if they say the same.

    Values that only have another name are the same: a value of `b` is shown under the name of the value of `a` that
    is computed by the same operation from the same values, so that a pass's effect stands alone.
    """
    first = [_BLANKS.sub("  ", line) for line in a.splitlines()]
    second = _renamed(first, [_BLANKS.sub("  ", line) for line in b.splitlines()])
    lines = difflib.unified_diff(first, second, before, after, lineterm="", n=2)
    return "".join(f"{line}\n" for line in lines)


def _renamed(first: list[str], second: list[str]) -> list[str]:
    """`second` with the names of `first`, walking down both: equal right-hand sides mean equal values."""
    known: dict[str, list[str]] = {}
    for line in first:
        name, key = _definition(line)
        if name is not None:
            known.setdefault(key, []).append(name)
    every = {name for line in first for name in _NAME.findall(line)}
    names: dict[str, str] = {}
    taken: set[str] = set()
    found = []
    for line in second:
        name, _ = _definition(line)
        right = _NAME.sub(lambda match: names.get(match[0], match[0]), line)
        if name is not None:
            _, key = _definition(right)
            # Inputs and operations made twice go by order.
            candidates = known.get(key, [])
            own = candidates.pop(0) if candidates else name
            if not candidates and own == name and (own in every or own in taken) and key not in known:
                own = _fresh(name, every | taken)
            names[name] = own
            taken.add(own)
            left, _, rest = right.partition(":")
            right = f"{left[: left.index('%')]}{own}:{rest}"
        found.append(right)
    return found


def _definition(line: str) -> tuple[str | None, str]:
    """(name, all the rest) of a line that defines a value; (None, line) of another one."""
    stripped = line.strip()
    match = _NAME.match(stripped)
    if match is None or not stripped[match.end() :].startswith(":"):
        return None, stripped
    return match[0], stripped[match.end() :].partition("  # ")[0]


def _fresh(name: str, taken: set[str]) -> str:
    number = 2
    while f"{name}.{number}" in taken:
        number += 1
    return f"{name}.{number}"


@dataclass(frozen=True)
class Difference:
    """The first node whose value differs between two executions.

    node: its name in the program's text. module, source: where it comes from, None if unknown. what: the two values
    in words. largest: the largest absolute difference; inf where dtype, shape or kind differ.
    """

    node: str
    module: str | None
    source: str | None
    what: str
    largest: float

    def __str__(self) -> str:
        module = "the root module" if self.module == "" else f"module '{self.module}'" if self.module else "no module"
        source = PurePath(self.source).name if self.source else "no source line"
        return f"{self.node} ({module}, {source}): {self.what}"


def first_difference(
    program: Program,
    inputs: Mapping[Role, Any],
    other: Mapping[str, Any] | Mapping[Role, Any],
    *,
    rtol: float = 0.0,
    atol: float = 0.0,
) -> Difference | None:
    """The first node, in order of execution, whose value differs between two executions of `program`.

    other: the inputs of the second execution by role, or the values of its nodes by name (those that are missing are
    not compared). Tensors are equal if all elements are within atol + rtol * |first|; NaN equals NaN. Both executions
    draw the same random numbers.
    """
    state = torch.get_rng_state()
    for node, value, counterpart in _pairs(program, inputs, other, state):
        if getattr(node.target, "overloadpacket", None) in _UNINITIALISED:
            continue
        found = _compare(value, counterpart, rtol, atol)
        if found is not None:
            note = meta.note(node)
            return Difference(printer.name(program, node), note.module, note.source, *found)
    return None


def _pairs(
    program: Program, inputs: Mapping[Role, Any], other: Mapping[Any, Any], state: torch.Tensor
) -> Iterator[tuple[Node, Any, Any]]:
    if not any(isinstance(key, Role) for key in other):
        for node, value in trace_values(program, inputs):
            if node.name in other:
                yield node, value, other[node.name]
        return
    # In step, so that no execution keeps all its values; each has a random stream of its own.
    one, two = trace_values(program, inputs), trace_values(program, other)
    states = [state, state.clone()]
    for _ in program.graph.nodes:
        torch.set_rng_state(states[0])
        first = next(one, None)
        states[0] = torch.get_rng_state()
        torch.set_rng_state(states[1])
        second = next(two, None)
        states[1] = torch.get_rng_state()
        if first is None or second is None:
            return
        yield first[0], first[1], second[1]


def _compare(a: Any, b: Any, rtol: float, atol: float) -> tuple[str, float] | None:
    if isinstance(a, tuple | list) and isinstance(b, tuple | list):
        parts = (_compare(x, y, rtol, atol) for x, y in zip(a, b, strict=False))
        return next((part for part in parts if part is not None), None)
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        same = type(a) is type(b) and (a is b or a == b)
        return None if same else (f"{_word(a)} and {_word(b)}", float("inf"))
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return f"{_word(a)} and {_word(b)}", float("inf")
    if torch.equal(a, b) or torch.allclose(b, a, rtol=rtol, atol=atol, equal_nan=True):
        return None
    gap = (a.double() - b.double()).abs().nan_to_num(float("inf")).flatten()
    place = int(gap.argmax())
    one, two = a.flatten()[place].item(), b.flatten()[place].item()
    return f"largest difference {gap[place].item():.3g} in {_word(a)}: {one:.6g} and {two:.6g}", gap[place].item()


def _word(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return repr(value)
