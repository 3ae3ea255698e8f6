"""Rules about what nodes compute: that it is known, over known symbols, and what the role asks for."""

from __future__ import annotations

from collections.abc import Iterator

import sympy
import torch

from graphcomp.compat.run_time_sizes import is_run_time_name
from graphcomp.ir import meta, spelling
from graphcomp.ir.effects import is_check, is_read_number, reads_numbers
from graphcomp.ir.fault import Fault
from graphcomp.ir.program import Program
from graphcomp.ir.signature import (
    Accumulator,
    Buffer,
    BufferUpdate,
    Denominator,
    Grad,
    Loss,
    LossScale,
    Metric,
    Param,
    Role,
    Saved,
    Seed,
    Size,
    Tokens,
)

_SCALARS = (Denominator, LossScale, Seed, Loss, Tokens, Metric)
_NUMBERS = torch.SymInt | torch.SymFloat | torch.SymBool | int | float

_MAY_YIELD_NOTHING = (torch.ops.aten.unbind.int,)  # of no rows


def values(program: Program) -> Iterator[Fault]:
    for node in program.graph.nodes:
        if node.op == "output" or is_check(node):
            continue
        parts = list(_parts(meta.value(node)))
        if not parts and node.target in _MAY_YIELD_NOTHING:
            continue
        if any(part is not None for part in parts) and all(
            isinstance(part, torch.Tensor | _NUMBERS | None) for part in parts
        ):
            continue
        what, do = f"the value of '{node.name}' is not known", "set it with `meta.set_value`"
        yield Fault(what, node, "fake tensors or numbers", meta.value(node), do)


def _parts(found: object) -> Iterator[object]:
    """What a value consists of: a result may be several, and one of these again."""
    if isinstance(found, tuple | list):
        for part in found:
            yield from _parts(part)
    else:
        yield found


def symbols(program: Program) -> Iterator[Fault]:
    known = {role.symbol for role in program.inputs if isinstance(role, Size)}
    for node in program.placeholders:
        found = meta.tensor(node)
        dims = () if found is None else map(spelling.expression, found.shape)
        known |= {str(dim) for dim in dims if isinstance(dim, sympy.Symbol)}
    for node in program.graph.nodes:
        # A size known at run time only is given by what reads it, or by anything that was kept since then.
        if node.op == "placeholder" or is_read_number(node):
            known |= set(filter(is_run_time_name, map(str, spelling.free_symbols(meta.value(node)))))
        strange = sorted({str(symbol) for symbol in spelling.free_symbols(meta.value(node))} - known)
        if strange and not reads_numbers(node):
            what, expected = (
                f"the value of '{node.name}' has a symbol that no input gives",
                ", ".join(sorted(known)),
            )
            yield Fault(what, node, expected or "no symbol", ", ".join(strange), "add the size to the inputs")


def agreement(program: Program) -> Iterator[Fault]:
    names = spelling.Symbols(program)
    inputs = {role: meta.value(node) for role, node in program.input_nodes()}
    border = [(role, node, meta.value(node)) for role, node in program.input_nodes()]
    results = [(role, node, meta.value(node)) for role, node in program.output_items() if node is not None]
    for role, node, found in border + results:
        text = spelling.value(found, names)
        if isinstance(role, Size):
            if not isinstance(found, torch.SymInt) or str(spelling.expression(found)) != role.symbol:
                expected = f"int {names.rename(role.symbol)}"
                yield Fault(f"'{names.role(role)}' has another value", node, expected, text)
        elif not isinstance(found, torch.Tensor):
            if not isinstance(role, Saved):
                yield Fault(f"'{role}' is no tensor", node, "a tensor", text)
        elif isinstance(role, _SCALARS) and found.dim() != 0:
            yield Fault(f"'{role}' has dimensions", node, "a tensor of no dimension", text)
        elif isinstance(role, Seed) and found.dtype != torch.int64:
            yield Fault(f"'{role}' is no integer", node, "i64[]", text)
    for role, node, found in results:
        source = next((one for one in _counterparts(role) if one in inputs), None)
        if source is not None and not _alike(found, inputs[source]):
            expected = spelling.value(inputs[source], names)
            yield Fault(f"'{role}' differs from '{source}'", node, expected, spelling.value(found, names))


def _counterparts(role: Role) -> tuple[Role, ...]:
    """The inputs whose shape and dtype an output must have: the first that there is."""
    if isinstance(role, Grad):
        return Accumulator(role.name), Param(role.name)
    return (Buffer(role.name),) if isinstance(role, BufferUpdate) else ()


def _alike(first: object, second: object) -> bool:
    """Same dtype and shape, compared as expressions: asking the tensors would add guards."""
    if not isinstance(first, torch.Tensor) or not isinstance(second, torch.Tensor):
        return False
    shapes = [[spelling.expression(size) for size in tensor.shape] for tensor in (first, second)]
    return first.dtype == second.dtype and shapes[0] == shapes[1]
