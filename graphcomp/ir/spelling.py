"""How the parts of a program are spelled: symbols, dtypes, values, literals, operations."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from pathlib import PurePath
from typing import Any

import sympy
import torch
from torch.fx import Node

from graphcomp.compat.operators import OpOverload, argument_names
from graphcomp.compat.run_time_sizes import is_run_time_name
from graphcomp.ir import meta
from graphcomp.ir.body import Body
from graphcomp.ir.effects import is_read_number, reads_numbers
from graphcomp.ir.groups import is_text
from graphcomp.ir.meta import Phase
from graphcomp.ir.program import Program
from graphcomp.ir.signature import Role, Size

_SHORT = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u", "complex": "c"}
_INFIX: dict[object, str] = {
    operator.add: "+", operator.sub: "-", operator.mul: "*", operator.floordiv: "//", operator.truediv: "/",
    operator.mod: "%", operator.pow: "**", operator.eq: "==", operator.ne: "!=", operator.lt: "<",
    operator.le: "<=", operator.gt: ">", operator.ge: ">=", operator.and_: "&", operator.or_: "|", operator.xor: "^",
}  # fmt: skip


def dtype(value: torch.dtype) -> str:
    """`f32`, `bf16`, `i64`, `bool`; other dtypes by torch's own name."""
    name = str(value).removeprefix("torch.")
    letters = name.rstrip("0123456789")
    return _SHORT[letters] + name[len(letters) :] if letters in _SHORT and letters != name else name


def expression(number: object) -> Any:
    """The sympy expression of a symbolic number, a plain number as it is; never adds a guard."""
    return number.node.expr if isinstance(number, torch.SymInt | torch.SymFloat | torch.SymBool) else number


def free_symbols(found: object) -> Iterator[sympy.Symbol]:
    """All symbols in a value."""
    if isinstance(found, torch.Tensor):
        strides = found.stride() if found.layout == torch.strided else ()
        for number in (*found.shape, *strides):
            if isinstance(number, torch.SymInt):  # most are plain, and the verifier asks for all
                yield from number.node.expr.free_symbols
    elif isinstance(found, tuple | list):
        for part in found:
            yield from free_symbols(part)
    elif isinstance(found, torch.SymInt | torch.SymFloat | torch.SymBool):
        yield from found.node.expr.free_symbols


class Symbols:
    """Renames symbols to s0, s1, ... : those of `Size` inputs in order, then others by first appearance.

    Those of sizes known at run time only become u0, u1, ... in the same way.
    """

    def __init__(self, program: Program) -> None:
        self._new: dict[str, str] = {}
        for role in program.inputs:
            if isinstance(role, Size):
                self.rename(role.symbol)
        self._texts: dict[object, str] = {}

    def rename(self, symbol: str) -> str:
        if symbol not in self._new:
            letter = "u" if is_run_time_name(symbol) else "s"
            self._new[symbol] = f"{letter}{sum(new.startswith(letter) for new in self._new.values())}"
        return self._new[symbol]

    def role(self, role: Role) -> Role:
        """The role as it prints: a size goes by its new symbol."""
        return Size(self.rename(role.symbol)) if isinstance(role, Size) else role

    def items(self) -> list[tuple[str, str]]:
        """All symbols met so far with their new names."""
        return list(self._new.items())

    def text(self, number: object) -> str:
        """An expression in the new symbols, in sympy's own fixed order of terms."""
        found = expression(number)
        if not isinstance(found, sympy.Basic):
            return str(found)
        if found not in self._texts:
            old = sorted(found.free_symbols, key=str)
            swap = {s: sympy.Symbol(self.rename(str(s)), **s.assumptions0) for s in old}
            self._texts[found] = str(found.xreplace(swap))
        return self._texts[found]

    def sizes(self, numbers: Any) -> str:
        return f"[{', '.join(self.text(number) for number in numbers)}]"


def value(found: object, symbols: Symbols) -> str:
    """`f32[s0, 64]` for a tensor, `int s0*s1` for a number, `(f32[], i64[s0])` for several, `?` if none."""
    if isinstance(found, torch.Tensor):
        return dtype(found.dtype) + symbols.sizes(found.shape)
    if isinstance(found, tuple | list):
        return f"({', '.join(value(part, symbols) for part in found)})"
    if found is None:
        return "?"
    kind = type(found).__name__.removeprefix("Sym").lower()
    if isinstance(found, bool | int | float | torch.SymInt | torch.SymFloat | torch.SymBool):
        return f"{kind} {symbols.text(found)}"
    return kind


def layout(found: object, symbols: Symbols) -> str:
    """The strides of a tensor unless they are those of a dense one, as ` strides [1, 64]`."""
    if not isinstance(found, torch.Tensor) or found.layout != torch.strided:
        return ""
    dense: list[object] = []
    step: Any = 1
    for size in reversed(found.shape):
        dense.insert(0, step)
        step = step * expression(size)
    strides = [expression(stride) for stride in found.stride()]
    same = all(a == b or expression(n) == 1 for a, b, n in zip(strides, dense, found.shape, strict=True))
    return "" if same else f" strides {symbols.sizes(strides)}"


def operation(target: object) -> str:
    """`mm` for aten.mm.default, `add.Tensor`, `_c10d_functional.all_reduce`, or a function's own name."""
    if isinstance(target, OpOverload):
        text = str(target).removesuffix(".default")
        return text.removeprefix("aten.")
    if isinstance(target, str):
        return target
    name = getattr(target, "__name__", None) or str(target)
    return name.rstrip("_") if getattr(target, "__module__", "") == "_operator" else name


def group_arguments(node: Node) -> set[object]:
    """The places (position and keyword) of a call's arguments that name a process group."""
    if not isinstance(node.target, OpOverload):
        return set()
    names = argument_names(node.target)
    return {place for i, name in enumerate(names) if name == "group_name" for place in (i, name)}


class Axes:
    """Names process groups by their mesh axis or their ranks, as programs do (see `ir.groups`).

    A group's own name, which only a raw graph holds, is a serial number that differs between runs: it is looked up in
    `axes`, or else numbered by first appearance.
    """

    def __init__(self, axes: Mapping[str, str]) -> None:
        self._axes, self._unnamed = axes, dict[str, str]()

    def __call__(self, group: str) -> str:
        if group in self._axes or is_text(group):
            return self._axes.get(group, group)
        return self._unnamed.setdefault(group, f"group{len(self._unnamed)}")


class Call:
    """Spells the right-hand side of a node; `name`, `group`, `device` and `body` spell what differs between texts.

    body: what stands for a function that a call takes; by default all of it.
    """

    def __init__(
        self,
        symbols: Symbols,
        name: Callable[[Node], str],
        group: Callable[[str], str],
        device: Callable[[torch.device], str],
        body: Callable[[Body], str] | None = None,
    ) -> None:
        self._symbols, self._name, self._spell_group, self._device = symbols, name, group, device
        self._body = body or (lambda taken: f"{{{'; '.join(self.function(taken))}}}")

    def function(self, body: Body) -> list[str]:
        """The lines of a function: its inputs, its calls, what it returns."""
        call = Call(self._symbols, lambda node: f"%{node.name}", self._spell_group, self._device)
        typed = {node: f"%{node.name}: {value(meta.value(node), self._symbols)}" for node in body.graph.nodes}
        calls = [f"{typed[node]} = {call.text(node)}" for node in body.calls]
        return [f"({', '.join(typed[node] for node in body.inputs)})", *calls, f"return {call.argument(body.returned)}"]

    def text(self, node: Node) -> str:
        if node.target is operator.getitem and len(node.args) == 2:
            return f"{self.argument(node.args[0])}[{self.argument(node.args[1])}]"
        if node.target in _INFIX and len(node.args) == 2:
            return f"{self.argument(node.args[0])} {_INFIX[node.target]} {self.argument(node.args[1])}"
        groups = group_arguments(node)
        parts = [self._group(a) if i in groups else self.argument(a) for i, a in enumerate(node.args)]
        parts += [f"{k}={self._group(a) if k in groups else self.argument(a)}" for k, a in node.kwargs.items()]
        prefix = "" if node.op == "call_function" else f"{node.op} "
        return f"{prefix}{operation(node.target)}({', '.join(parts)})"

    def argument(self, found: object) -> str:
        if isinstance(found, Node):
            return self._name(found)
        if isinstance(found, Body):
            return self._body(found)
        if isinstance(found, list | tuple):
            return f"[{', '.join(self.argument(part) for part in found)}]"
        if isinstance(found, slice):
            parts = (found.start, found.stop, found.step)
            return f"slice({', '.join(map(self.argument, parts))})"
        if isinstance(found, dict):
            return f"{{{', '.join(f'{key}: {self.argument(part)}' for key, part in found.items())}}}"
        if isinstance(found, torch.dtype):
            return dtype(found)
        if isinstance(found, torch.device):
            return self._device(found)
        if isinstance(found, torch.layout | torch.memory_format):
            return str(found).removeprefix("torch.").removesuffix("_format")
        if isinstance(found, torch.SymInt | torch.SymFloat | torch.SymBool):
            return self._symbols.text(found)
        if isinstance(found, torch.Tensor):
            return f"tensor {value(found, self._symbols)}"
        if isinstance(found, str | int | float | complex | type(None)):
            return repr(found)
        return operation(found)

    def _group(self, found: object) -> str:
        named = found if isinstance(found, str) else getattr(found, "group_name", type(found).__name__)
        return self._spell_group(str(named))


def is_run_time_input(node: Node) -> bool:
    """Whether a node gives one size that is known at run time only: where it was read, or where it was kept since."""
    found = expression(meta.value(node))
    given = node.op == "placeholder" or is_read_number(node)
    return given and isinstance(found, sympy.Symbol) and is_run_time_name(str(found))


def node_names(program: Program, symbols: Symbols) -> dict[Node, str]:
    """What each node is called in print: its own name; the symbol itself for a size, one known at run time included."""
    names: dict[Node, str] = {}
    for role, node in zip(program.inputs, program.placeholders, strict=False):
        if isinstance(role, Size):
            names[node] = symbols.rename(role.symbol)
    for node in program.graph.nodes:
        if reads_numbers(node):
            value(meta.value(node), symbols)  # the number of rows that come first, also if nobody reads it
        if is_run_time_input(node):
            names[node] = symbols.rename(str(expression(meta.value(node))))
    taken = set(names.values())
    for node in program.graph.nodes:
        if node not in names:
            names[node] = f"{node.name}_" if node.name in taken else node.name
    return names


def comment(node: Node, twins: Mapping[int, str]) -> str:
    """Where a node comes from: module, source line, forward twin (where the program holds it) and marks.

    twins: operation number -> name of the forward node.
    """
    note = meta.note(node)
    source = PurePath(note.source).name if note.source else None  # folders differ between machines
    parts = ["(root)" if note.module == "" else note.module, source]
    if note.phase is Phase.BACKWARD and note.operation is not None and note.operation in twins:
        parts.append(f"of %{twins[note.operation]}")
    if note.gradient_sum:
        parts.append("gradient sum")
    if note.recompute is not None:
        parts.append(f"recompute {note.recompute}")
    return "  ".join(part for part in parts if part)
