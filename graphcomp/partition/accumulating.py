"""Gradients summed inside the program that computes them: each is added to what earlier microbatches have left.

    before: %g = mm(%a, %b)                               return grad w = %g
    after:  %g = mm(%a, %b)    %sum = add(%acc, %g)       return grad w = %sum       # input: accumulator w

A backend writes the sum to the accumulator's memory, so a gradient lives from where it is computed to where it is
added: besides the sums of a stage only few gradients exist at a time, never a second set of all.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.fx import Node

from graphcomp.ir import meta
from graphcomp.ir.program import Program
from graphcomp.ir.signature import Accumulator, Grad, Role
from graphcomp.partition.stages import Partitioned

_aten = torch.ops.aten


def accumulated(program: Program) -> tuple[str, ...]:
    """The parameters whose gradients a stage program yields: those of its accumulators, in order."""
    return tuple(role.name for role, node in program.output_items() if isinstance(role, Grad) and node is not None)


def accumulating(program: Program, cut: Partitioned, dtype: torch.dtype | None = None) -> Program:
    """A copy of a stage program with an `Accumulator` input, at the end, for each gradient that it yields.

    dtype: of the accumulators; None: each parameter's own.
    """
    copy = program.copy()
    results = list(copy.results)
    inputs: list[Role] = list(copy.inputs)
    for place, role in enumerate(copy.outputs):
        if isinstance(role, Grad) and results[place] is not None:
            accumulator = _accumulator(copy, role.name, cut.accumulator(role.name, dtype))
            inputs.append(Accumulator(role.name))
            results[place] = _sum(copy, accumulator, results[place])
    copy.output_node.args = (tuple(results),)
    copy.set_signature(inputs, copy.outputs)
    return copy


def in_place(program: Program) -> Program:
    """A copy in which every sum is written to its accumulator's memory where it is computed.

    It is no pure program any more: only for making it callable.
    """
    copy = program.copy()
    results = list(copy.results)
    placeholders = copy.placeholders
    for source, target in written(copy):
        accumulator, total = placeholders[source], results[target]
        (add,) = accumulator.users
        add.target = _aten.add_.Tensor  # rounds to the accumulator's dtype by itself
        meta.set_value(add, meta.value(accumulator))
        if total is not add:
            total.replace_all_uses_with(add)
            copy.graph.erase_node(total)
    return copy


def written(program: Program) -> Iterator[tuple[int, int]]:
    """(place of an accumulator among the inputs, place of the sum among the outputs)."""
    places = {role: place for place, role in enumerate(program.outputs)}
    for place, role in enumerate(program.inputs):
        if isinstance(role, Accumulator):
            yield place, places[Grad(role.name)]


def _accumulator(program: Program, name: str, form: torch.Tensor) -> Node:
    graph = program.graph
    first = next(node for node in graph.nodes if node.op != "placeholder")
    with graph.inserting_before(first):
        node = graph.placeholder("acc_" + name.replace(".", "_"))
        node.target = node.name  # which is unique
    meta.set_value(node, form)
    return node


def _sum(program: Program, accumulator: Node, gradient: Node) -> Node:
    """Right behind the gradient, in the accumulator's dtype."""
    graph, form = program.graph, meta.tensor(accumulator)
    behind = gradient if gradient.op != "placeholder" else accumulator
    with graph.inserting_after(behind):
        total = graph.call_function(_aten.add.Tensor, (accumulator, gradient))
    meta.inherit(total, gradient)
    found = meta.tensor(gradient)
    if form is None or found is None or torch.promote_types(form.dtype, found.dtype) is form.dtype:
        meta.set_value(total, form)
        return total
    with program.fake_mode:
        meta.set_value(total, torch.empty_like(form, dtype=torch.promote_types(form.dtype, found.dtype)))
    with graph.inserting_after(total):
        rounded = graph.call_function(_aten._to_copy.default, (total,), {"dtype": form.dtype})
    meta.inherit(rounded, gradient)
    meta.set_value(rounded, form)
    return rounded
