"""What ranks do together while their pipelines run: in one order on all of them, or they would not meet."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch.fx import Node

from graphcomp.compat.collective_operators import ALL_TO_ALL
from graphcomp.compat.process_groups import ranks_of
from graphcomp.compat.symbols import expression, symbol_names
from graphcomp.ir import meta
from graphcomp.ir.collective_calls import axis_of, is_start
from graphcomp.ir.digest import number_of
from graphcomp.ir.program import Program
from graphcomp.ir.sizes import evaluator
from graphcomp.ir.spelling import Symbols, dtype, operation, value
from graphcomp.partition import Partitioned
from graphcomp.partition.stages import Stage
from graphcomp.schedule.actions import Action, Kind


@dataclass(frozen=True)
class Exchanges:
    """One line for each, in order. shapes: of those whose values have to be of one shape on all ranks, and depend on
    the microbatch: its place, and the shape from its sizes.
    """

    lines: tuple[str, ...] = ()
    shapes: tuple[tuple[int, Callable[[Mapping[str, int]], tuple[int, ...]]], ...] = ()

    def at(self, sizes: Sequence[Mapping[str, int]]) -> Exchanges:
        """With all shapes that they have in a step; sizes: of each microbatch."""
        if not self.shapes:
            return self
        found = [f"microbatch {place}: a collective of {shape(sizes[place])}" for place, shape in self.shapes]
        return Exchanges((*self.lines, *found))

    @cached_property
    def number(self) -> int:
        """The same in every process for equal exchanges; 0 for none."""
        return number_of("\n".join(self.lines)) if self.lines else 0


def exchanges(
    actions: Sequence[Action],
    specialisations: Sequence[Partitioned],
    regather: bool,
    peers: Sequence[int] = (),
    formulas: bool = True,
) -> Exchanges:
    """Of a rank that does these actions; what is done once a step is not among them.

    specialisations: one a microbatch. regather: parameters are gathered before each action. peers: global ranks, along
    an axis of the mesh; collectives of the model over all of them count. formulas: the peers have the same program, and
    so the same formulas for sizes; otherwise only the sizes count.
    """
    lines: list[str] = []
    shapes = []
    for action in actions:
        cut = specialisations[action.microbatch]
        program = _program(cut.stages[action.stage], action)
        if program is not None:
            found = ["gathers its parameters"] if regather else []
            for node in _collectives(program, cut, set(peers)):
                found.append(_text(node, Symbols(program), formulas))
                shape = _shape(node, program)
                if shape is not None:
                    shapes.append((action.microbatch, shape))
            lines += [f"stage {action.stage}, {action.kind.name}: {text}" for text in found]
    return Exchanges(tuple(lines), tuple(shapes))


def _program(stage: Stage, action: Action) -> Program | None:
    return {Kind.F: stage.forward, Kind.B: stage.backward, Kind.FB: stage.fused}.get(action.kind)


def _collectives(program: Program, cut: Partitioned, peers: set[int]) -> Iterator[Node]:
    for node in filter(is_start, program.calls()):
        name = cut.joint.groups.get(axis_of(node) or "")
        if name is not None and peers and peers <= set(ranks_of(name)):
            yield node


def _text(node: Node, symbols: Symbols, formulas: bool) -> str:
    source, tensor = meta.note(node).source, meta.tensor(node)
    where = f" at {source}" if source else ""
    form = value(meta.value(node), symbols)
    if not formulas and tensor is not None and any(isinstance(size, torch.SymInt) for size in tensor.shape):
        form = f"{dtype(tensor.dtype)} of {tensor.dim()} dimensions"
    return f"{operation(node.target)} over {axis_of(node)}, gives {form}{where}"


def _shape(node: Node, program: Program) -> Callable[[Mapping[str, int]], tuple[int, ...]] | None:
    """The shape of what a rank gives to a collective, from the sizes of a microbatch; None if it is fixed, or free."""
    given = meta.tensor(node.all_input_nodes[0])
    if given is None or node.target is ALL_TO_ALL:
        return None
    expressions = [expression(program.fake_mode, size) for size in given.shape]  # none known at run time only
    symbols = sorted(symbol_names(expressions))
    evaluate = evaluator(expressions, symbols)
    return (lambda sizes: evaluate(*(sizes[symbol] for symbol in symbols))) if symbols else None
