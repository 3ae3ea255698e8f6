"""A short name for what a program computes, so that structurally equal programs are compiled once."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from graphcomp.ir import meta, spelling
from graphcomp.ir.program import Program


def digest(program: Program) -> str:
    """Equal for programs that one compiled artifact can serve: 32 hexadecimal digits.

    Counts: operations with all their literals, dtypes, devices, symbolic shapes and the ranges of their
    symbols, strides of inputs, the kinds of the roles in order. Does not count: names of nodes, symbols,
    parameters and programs, annotations, the contents of constants (they are inputs).
    """
    return hashlib.sha256("\n".join(canonical(program)).encode()).hexdigest()[:32]


def number_of(text: str) -> int:
    """A text in 56 bits: the same in every process, which Python's own hash of texts is not."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7])


def canonical(program: Program) -> list[str]:
    """The lines that the digest is taken of."""
    symbols = spelling.Symbols(program)
    names = {node: str(place) for place, node in enumerate(program.graph.nodes)}
    # Groups go by the texts that programs use, devices by their own names: a digest serves one process.
    call = spelling.Call(symbols, lambda node: f"%{names[node]}", str, str)
    lines = []
    for role, node in program.input_nodes():
        lines.append(f"{type(role).__name__} {_full(meta.value(node), symbols)}")
    for node in program.calls():
        computed = _full(meta.value(node), symbols)
        lines.append(f"%{names[node]} {computed} = {node.op} {node.target} {call.text(node)}")
    for role, result in program.output_items():
        lines.append(f"{type(role).__name__} {call.argument(result)}")
    return lines + _ranges(program, symbols)


def _full(found: object, symbols: spelling.Symbols) -> str:
    """A value with everything that code may be specialised on."""
    if isinstance(found, tuple | list):
        return f"({', '.join(_full(part, symbols) for part in found)})"
    if not isinstance(found, torch.Tensor):
        return spelling.value(found, symbols)
    if found.layout != torch.strided:
        return f"{found.dtype} {found.device} {symbols.sizes(found.shape)} {found.layout}"
    strides, offset = symbols.sizes(found.stride()), symbols.text(found.storage_offset())
    return f"{found.dtype} {found.device} {symbols.sizes(found.shape)} {strides} {offset}"


def _ranges(program: Program, symbols: spelling.Symbols) -> list[str]:
    """The values each size may take: a compiler relies on them to drop cases."""
    environment: Any = getattr(program.fake_mode, "shape_env", None)
    bounds = {} if environment is None else {str(s): b for s, b in environment.var_to_range.items()}
    known = [(new, bounds[old]) for old, new in symbols.items() if old in bounds]
    return [f"{new} in {bound.lower}..{bound.upper}" for new, bound in known]
