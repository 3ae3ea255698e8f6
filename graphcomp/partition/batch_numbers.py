"""Numbers read out of the batch alone: read before a step begins, on every rank, and inputs of all programs from then
on. So they are sizes like those of the batch, which may cross between stages.

    %n = read_sum(%mask)[0]  ...    ->    before: return size u0 = %n      %u0: int = size u0  ...

Sound: the batch is the same before the step as within it, and what leads to the number is exact: of floating point only
what the batch holds itself. What is rounded may come out another way in other code, before the step and on each stage,
and would pick other rows than were counted; such numbers are read where the rows are picked.
"""

from __future__ import annotations

from torch.fx import Node

from graphcomp.capture.before import Before
from graphcomp.compat.symbols import expression
from graphcomp.ir import meta
from graphcomp.ir import signature as role
from graphcomp.ir.effects import is_collective, is_read_number, reads_numbers
from graphcomp.ir.meta import Phase
from graphcomp.ir.normalize import computed, replace_by_number
from graphcomp.ir.program import Level, Program
from graphcomp.ir.randomness import draws
from graphcomp.partition.exact import is_exact
from graphcomp.partition.extract import extract

_BATCH = (role.BatchLeaf, role.Size, role.Constant)


def read_before(program: Program) -> tuple[Program, Before | None]:
    """A joint program that is given what it read of the batch alone, and what reads it.

    None, and the program itself, where it reads nothing of that kind.
    """
    reads = _of_the_batch(program)
    if not reads:
        return program, None
    program = program.copy()
    reads = _of_the_batch(program)
    graph, mode = program.graph, program.fake_mode
    numbers = [node for node in program.calls() if is_read_number(node) and node.args[0] in reads]
    found: dict[str, Node] = {}
    for node in numbers:
        number = expression(mode, meta.value(node))
        if not isinstance(number, int) and number.is_Symbol:
            found.setdefault(str(number), node)
    results = [(role.Size(symbol), node) for symbol, node in found.items()]
    before = extract(program, "sizes of the batch", reads, {}, results, computes=lambda node: True, level=Level.STAGE)
    sizes = {what.symbol: node for what, node in program.input_nodes() if isinstance(what, role.Size)}
    roles, first = list(program.inputs), program.calls()[0]
    for symbol, node in found.items():
        if symbol not in sizes:
            with graph.inserting_before(first):
                sizes[symbol] = graph.placeholder(f"size_{symbol}")
            meta.set_value(sizes[symbol], meta.value(node))
            roles.append(role.Size(symbol))
    for node in numbers:
        number = expression(mode, meta.value(node))
        if isinstance(number, int):
            replace_by_number(node, number)
        else:
            with graph.inserting_before(node):
                node.replace_all_uses_with(computed(graph, number, sizes, node))
        graph.erase_node(node)
    for node in reversed(reads):
        graph.erase_node(node)
    program.set_signature(roles, program.outputs)
    return program, Before(before)


def _of_the_batch(program: Program) -> list[Node]:
    """The calls that read what follows exactly from the batch alone."""
    known = {node for what, node in program.input_nodes() if isinstance(what, _BATCH)}
    found = []
    for node in program.calls():
        apart = draws(node) or is_collective(node) or meta.note(node).phase is Phase.BACKWARD
        if not apart and known.issuperset(node.all_input_nodes) and is_exact(node):
            known.add(node)
            if reads_numbers(node):
                found.append(node)
    return found
