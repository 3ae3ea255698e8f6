"""A program as text for comparing it with that of another process: nodes go by their places.

Names of nodes count what a trace made and dropped again, so they may differ where the programs are the same.
"""

from __future__ import annotations

from graphcomp.ir import meta, spelling
from graphcomp.ir.program import Program


def comparable(program: Program) -> str:
    """One line for each input, call and output, with module and source line; equal for equal programs."""
    symbols = spelling.Symbols(program)
    names = {node: f"%{place}" for place, node in enumerate(program.graph.nodes)}
    call = spelling.Call(symbols, lambda node: names.get(node, "%?"), spelling.Axes({}), lambda device: device.type)
    lines = []
    for role, node in program.input_nodes():
        found = meta.value(node)
        form = spelling.value(found, symbols) + spelling.layout(found, symbols)
        lines.append(f"{names[node]}: {form} = {symbols.role(role)}")
    for node in program.calls():
        about = spelling.comment(node, {})
        text = f"{names[node]}: {spelling.value(meta.value(node), symbols)} = {call.text(node)}"
        lines.append(f"{text}  # {about}" if about else text)
    for role, result in program.output_items():
        lines.append(f"return {role} = {call.argument(result)}")
    return "\n".join(lines)
