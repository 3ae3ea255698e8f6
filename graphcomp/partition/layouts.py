"""Memory layout of values that cross: a message is dense and row-major, a value need not be.

A transposed value crosses turned into row-major order and is turned back by each stage that reads it, so that every
operation sees the strides it was traced with: it may rely on them (`view`), and rounding may depend on them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch.fx import Graph, Node

from graphcomp.compat.estimates import hint
from graphcomp.compat.fake_reads import unnoted
from graphcomp.compat.pytree import tree_map
from graphcomp.compat.symbolic_sizes import symbolic_bodies
from graphcomp.ir import meta, spelling
from graphcomp.ir.effects import reads_numbers
from graphcomp.ir.program import Program
from graphcomp.ir.signature import Activation, Role
from graphcomp.partition.place import Slot

permute = torch.ops.aten.permute.default


def turn_crossing(program: Program, crossing: Iterable[Node], slots: dict[Node, Slot], replicable: set[Node]) -> bool:
    """Put a pair of permutations between each transposed value that crosses and its readers on other stages.

    The first belongs to the value's own slot, the second to no stage. Returns whether anything was inserted.
    """
    changed = False
    for node in crossing:
        order = _row_major(node)
        if order is None:
            continue
        own = slots[node].stage
        readers = [user for user in node.users if user in slots and slots[user].stage != own]
        if not readers:
            continue
        back = [order.index(dimension) for dimension in range(len(order))]
        with program.graph.inserting_after(node):
            turned = _permuted(program, node, order)
        with program.graph.inserting_after(turned):
            restored = _permuted(program, turned, back)
        slots[turned] = slots[node]
        replicable.add(restored)
        for reader in readers:
            reader.replace_input_with(node, restored)
        changed = True
    return changed


def arrive_dense(program: Program, saved: Mapping[Role, object]) -> Program:
    """Give each message the strides with which it arrives, and to all that is computed from it what follows.

    saved: what the forward of the same stage keeps, as it has it; a backward takes it over.
    """
    changed: set[Node] = set()
    for what, node in program.input_nodes():
        value, kept = meta.tensor(node), saved.get(what)
        if value is None:
            continue
        if isinstance(what, Activation) and not _is_dense(value):
            with program.fake_mode:
                meta.set_value(node, torch.empty(value.shape, dtype=value.dtype, device=value.device))
            changed.add(node)
        elif isinstance(kept, torch.Tensor) and _strides(kept) != _strides(value):
            meta.set_value(node, kept)
            changed.add(node)
    for node in program.calls() if changed else []:
        if reads_numbers(node):
            continue  # which have no layout, and are other symbols each time
        if not changed.isdisjoint(node.all_input_nodes) and callable(node.target):
            args, kwargs = tree_map(_known, node.args), tree_map(_known, node.kwargs)
            with program.fake_mode, symbolic_bodies(), unnoted(program.fake_mode):
                meta.set_value(node, node.target(*args, **kwargs))
            changed.add(node)
    return program


def _known(argument: object) -> object:
    return meta.value(argument) if isinstance(argument, Node) else argument


def _strides(value: torch.Tensor) -> tuple[object, ...]:
    return tuple(map(spelling.expression, value.stride()))


def _permuted(program: Program, node: Node, order: list[int]) -> Node:
    graph: Graph = program.graph
    result = graph.call_function(permute, (node, order))
    value = meta.tensor(node)
    if value is not None:
        with program.fake_mode:
            meta.set_value(result, value.permute(order))
    meta.annotate(result, meta.note(node))
    return result


def _row_major(node: Node) -> list[int] | None:
    """The dimensions from the widest stride to the narrowest; None if that is their own order, or some repeat."""
    value = meta.tensor(node)
    if value is None:
        return None
    strides = [hint(stride) for stride in value.stride()]
    if 0 in strides:
        return None
    order = sorted(range(len(strides)), key=lambda dimension: (-strides[dimension], dimension))
    # A dimension of one element has any stride.
    wide = [dimension for dimension in order if hint(value.shape[dimension]) != 1]
    return None if wide == sorted(wide) else order


def _is_dense(value: torch.Tensor) -> bool:
    step = 1
    for length, stride in zip(reversed(value.shape), reversed(value.stride()), strict=True):
        if hint(length) != 1 and hint(stride) != step:
            return False
        step *= hint(length)
    return True
