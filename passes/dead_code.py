"""Removes what no output needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch.fx import Node

from graphcomp.ir import meta
from graphcomp.ir.effects import reads_numbers
from graphcomp.ir.program import Program
from graphcomp.ir.relations import is_checked
from graphcomp.ir.signature import Constant, Size
from graphcomp.passes.base import Pass
from graphcomp.passes.driver import ERASE, Erase, rewrite_nodes
from graphcomp.passes.effects import has_effect
from graphcomp.passes.symbols import bare_symbols, symbols_of


@dataclass(frozen=True)
class DeadCode(Pass):
    """Erases operations whose results nobody reads, then the inputs that nobody reads.

    Level: joint and stage. The signature keeps all outputs; inputs that are no longer read leave it.

    Sound because the operations of a program write nothing. Three kinds are kept even when unused: random
    operations, for every later draw of the stream would change, collectives, for all ranks must issue the
    same list, and where numbers are read that code relies on, for there it is checked.

        before: %a = sin(%x)    %b = cos(%y)    return %a      # inputs x, y
        after:  %a = sin(%x)                    return %a      # input x
    """

    name: ClassVar[str] = "dead_code"

    def apply(self, program: Program) -> Program:
        rewrite_nodes(program, _unused, backwards=True)
        needed = _needed_symbols(program)
        kept = []
        for role, node in list(program.input_nodes()):
            if node.users or (isinstance(role, Size) and role.symbol in needed):
                kept.append(role)
            else:
                program.graph.erase_node(node)
        program.set_signature(kept, program.outputs)
        names = {str(role.name) for role in kept if isinstance(role, Constant)}
        program.constants = {name: literal for name, literal in program.constants.items() if name in names}
        return program


def _needed_symbols(program: Program) -> set[str]:
    """Symbols that stand in the values of used nodes and in no shape of an input that stays."""
    nodes = [node for node in program.graph.nodes if node.users]
    found = {symbol for node in nodes for symbol, _ in symbols_of(meta.value(node), program.fake_mode)}
    return found - {symbol for node in program.placeholders if node.users for symbol in bare_symbols(node, program)}


def _unused(node: Node) -> Erase | None:
    needless = not has_effect(node) or (reads_numbers(node) and not is_checked(node))
    return ERASE if not node.users and needless else None
