"""A program as text: the same on every run and every rank. Tests compare it and users read it."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import zip_longest

from torch.fx import Node

from graphcomp.ir import meta, spelling
from graphcomp.ir.body import Body
from graphcomp.ir.digest import digest
from graphcomp.ir.effects import is_check
from graphcomp.ir.meta import Phase
from graphcomp.ir.program import Program
from graphcomp.ir.signature import Size

__all__ = ["digest", "print_program", "window"]

_COLUMN = 78  # where comments begin; fixed, so that one changed line changes no other


def print_program(program: Program, notes: bool = True, groups: Mapping[str, str] | None = None) -> str:
    """The whole program, one line a node.

    notes: with the phase as section lines and, right of each node, its module, source line and forward twin.
    groups: process-group name -> mesh axis name, for a raw graph; what else is no axis is numbered by first appearance.

    The functions that calls take are @0, @1, ... by first appearance, equal ones once; they stand at the end.
    """
    return "\n".join(text for _, text in _lines(program, notes, groups or {})) + "\n"


def window(program: Program, node: Node, around: int = 4, groups: Mapping[str, str] | None = None) -> str:
    """The lines around one node (an input, a call, or the output node), which is marked with `>`."""
    lines = [item for item in _lines(program, True, groups or {}) if item[0] is not None]
    marked = [place for place, (owner, _) in enumerate(lines) if owner is node]
    first, last = (marked[0], marked[-1]) if marked else (0, 0)
    shown = range(max(0, first - around), min(len(lines), last + around + 1))
    return "\n".join(f"{'>' if place in marked else ' '} {lines[place][1].lstrip()}" for place in shown)


def name(program: Program, node: Node) -> str:
    """What a node is called in the program's text, with its percent sign."""
    return f"%{spelling.node_names(program, spelling.Symbols(program)).get(node, node.name)}"


def _lines(program: Program, notes: bool, groups: Mapping[str, str]) -> list[tuple[Node | None, str]]:
    """Every line with the node it belongs to; tolerates broken programs, for the verifier shows them."""
    symbols = spelling.Symbols(program)
    names = spelling.node_names(program, symbols)
    axes = spelling.Axes(groups)
    bodies: dict[Body, str] = {}
    call = spelling.Call(
        symbols,
        lambda n: f"%{names.get(n, f'{n.name}?')}",
        axes,
        lambda d: d.type,
        lambda body: bodies.setdefault(body, f"@{len(bodies)}"),
    )
    twins: dict[int, str] = {}
    for node in names:
        note = meta.note(node)
        if note.operation is not None and note.phase is not Phase.BACKWARD:
            twins.setdefault(note.operation, names[node])
    lines: list[tuple[Node | None, str]] = [(None, f'{program.level} program "{program.name}"')]
    roles = iter(program.inputs)
    section: str | None = None
    for node in program.graph.nodes:
        if node.op == "output":
            lines += [(node, text) for text in _results(program, call)]
            continue
        found = () if is_check(node) else meta.value(node)
        head = f"  %{names[node]}: {spelling.value(found, symbols)}"
        if node.op == "placeholder":
            role = next(roles, None)
            named = "?" if role is None else symbols.role(role)
            if isinstance(role, Size):
                head = f"  %{names[node]}: int"  # its expression is the symbol itself
            lines.append((node, f"{head}{spelling.layout(found, symbols)} = {named}"))
            continue
        if notes and meta.note(node).phase != section:
            section = meta.note(node).phase
            lines.append((None, f"{section}:"))
        text = f"{head} = {call.text(node)}"
        about = spelling.comment(node, twins) if notes else ""
        lines.append((node, f"{text:<{_COLUMN}}  # {about}" if about else text))
    for body, called in bodies.items():
        given, *rest = call.function(body)
        lines += [(None, f"function {called}{given}"), *((None, f"  {line}") for line in rest)]
    return lines


def _results(program: Program, call: spelling.Call) -> list[str]:
    returned = program.output_node.args[0] if program.output_node.args else ()
    results = returned if isinstance(returned, tuple | list) else (returned,)
    missing = object()
    texts = []
    for role, result in zip_longest(program.outputs, results, fillvalue=missing):
        left = "?" if role is missing else str(role)
        texts.append(f"return {left} = {'?' if result is missing else call.argument(result)}")
    return texts or ["return"]
