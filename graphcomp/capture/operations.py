"""Which forward node each backward node differentiates."""

from __future__ import annotations

from bisect import bisect_left

from torch.fx import Graph, Node

from graphcomp.capture.labels import sequence_of
from graphcomp.compat.operators import OpOverload, is_mutable
from graphcomp.ir import meta
from graphcomp.ir.collective_calls import is_start
from graphcomp.ir.meta import Phase


def number_operations(graph: Graph) -> None:
    """Number the differentiable operations; give each backward node its operation's number, module and source line.

    The first node made under a sequence number is the one that autograd recorded: the number is given just before. An
    operation in place whose backward needs what was there before first makes a copy, which takes the next number: its
    node is the first that writes under a later number. Of an operation that communicates the collective is the node:
    what is done before, such as a copy of what is dense already, may be removed.
    """
    twins: dict[int, Node] = {}
    writers: dict[int, Node] = {}
    backward: list[tuple[int, Node]] = []
    for node in graph.nodes:
        sequence = sequence_of(node)
        if node.op != "call_function" or sequence is None:
            continue
        if meta.note(node).phase is Phase.BACKWARD:
            backward.append((sequence, node))
        else:
            first = twins.setdefault(sequence, node)
            if is_start(node) and not is_start(first):
                twins[sequence] = node
            if isinstance(node.target, OpOverload) and is_mutable(node.target):
                writers.setdefault(sequence, node)
    order = sorted(twins)
    found: dict[int, Node] = {}
    for sequence in sorted({sequence for sequence, _ in backward}):
        place = bisect_left(order, sequence)
        if place < len(order):
            later = order[place]
            found[sequence] = twins[later] if later == sequence else writers.get(later, twins[later])
    numbers = {node: number for number, node in enumerate(dict.fromkeys(found.values()))}
    for node, number in numbers.items():
        meta.amend(node, operation=number)
    for sequence, node in backward:
        if sequence in found:
            at = meta.note(found[sequence])
            meta.amend(node, operation=at.operation, module=at.module, source=at.source)
