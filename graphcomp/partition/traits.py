"""What a node is to the partition: a number, a view, a cheap value that every stage can compute for itself."""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from graphcomp.compat.aliasing import viewed_argument
from graphcomp.compat.operators import OpOverload
from graphcomp.ir import meta
from graphcomp.ir import signature as role
from graphcomp.ir.collective_calls import is_wait
from graphcomp.ir.effects import is_check, is_impure
from graphcomp.ir.meta import Phase
from graphcomp.ir.program import Program
from graphcomp.ir.run_time_sizes import has_run_time_size
from graphcomp.partition.costs import work as work_of

# A value from the batch alone is computed again on each stage up to this share of the forward's work, or else sent.
CHEAP_SHARE = 0.02


def is_number(node: Node) -> bool:
    """Whether a node computes no tensor (a size, a flag)."""
    found = meta.value(node)
    return isinstance(found, (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool))


def is_view(node: Node) -> bool:
    """Whether a node only shows its first argument's memory in another shape, none of it left out."""
    if viewed_argument(node) is None or not isinstance(node.target, OpOverload):
        return False
    return node.target.overloadpacket not in _PARTIAL


def is_alias(node: Node) -> bool:
    """Whether a node is its argument under another name, strides and all."""
    return isinstance(node.target, OpOverload) and node.target.overloadpacket in _SAME


def stays_with_source(node: Node) -> bool:
    """Whether a node belongs to the stage of its first input: a part of it, or a check."""
    return is_part(node) or is_check(node)


def is_part(node: Node) -> bool:
    """Whether a node stays with its first input: a part of a tuple, or the wait of a collective."""
    source = node.all_input_nodes[0] if node.all_input_nodes else None
    return source is not None and (isinstance(meta.value(source), (tuple, list)) or is_wait(node))


_SAME = {torch.ops.aten.detach, torch.ops.aten.alias}

_PARTIAL = {
    torch.ops.aten.slice,
    torch.ops.aten.select,
    torch.ops.aten.split,
    torch.ops.aten.split_with_sizes,
    torch.ops.aten.unbind,
    torch.ops.aten.chunk,
    torch.ops.aten.diagonal,
    torch.ops.aten.as_strided,
}


def replicable_nodes(program: Program) -> set[Node]:
    """Nodes without an owner: each stage that needs one computes it for itself, and nothing is sent.

    These are numbers, views of parameters and other inputs, and forward values that follow cheaply from the batch,
    sizes, constants and buffers. A buffer that the program updates does not count: its stage alone knows its value.
    """
    updated = {what.name for what in program.outputs if isinstance(what, role.BufferUpdate)}
    found: set[Node] = set()
    from_batch: dict[Node, int] = {}  # estimated work of the value with all that leads to it
    shown: set[Node] = set()  # inputs and views of inputs
    for what, node in program.input_nodes():
        shown.add(node)
        fixed = (role.Param, role.LossScale, role.Denominator)
        if not isinstance(what, fixed) and not (isinstance(what, role.Buffer) and what.name in updated):
            from_batch[node] = 0
    budget = CHEAP_SHARE * sum(work_of(n) for n in program.calls() if meta.note(n).phase is Phase.FORWARD)
    for node in program.calls():
        inputs = node.all_input_nodes
        if has_run_time_size(node):  # known where it was read, and there alone
            continue
        if is_number(node) and all(map(is_number, inputs)):
            found.add(node)
            from_batch[node] = 0
        elif is_view(node) and viewed_argument(node) in shown:
            found.add(node)
            shown.add(node)
            if viewed_argument(node) in from_batch:
                from_batch[node] = 0
        elif (
            meta.note(node).phase is not Phase.BACKWARD and all(n in from_batch for n in inputs) and not is_impure(node)
        ):
            work = work_of(node) + sum(from_batch[n] for n in inputs)
            if work <= budget:
                from_batch[node] = work
                found.add(node)
    return found


def uses_parameter(node: Node, replicable: set[Node], parameters: set[Node]) -> bool:
    """Whether an owned node reads a parameter, directly or through views."""
    pending = list(node.all_input_nodes)
    while pending:
        current = pending.pop()
        if current in parameters:
            return True
        if current in replicable:
            pending.extend(current.all_input_nodes)
    return False


def order_of(graph: Graph) -> dict[Node, int]:
    """Position of every node in the graph."""
    return {node: position for position, node in enumerate(graph.nodes)}
