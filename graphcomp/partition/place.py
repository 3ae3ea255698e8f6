"""The owner of every node: which stage runs it, in forward or in backward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch.fx import Node

from graphcomp.errors import StateError
from graphcomp.ir import meta
from graphcomp.ir import signature as role
from graphcomp.ir.program import Program
from graphcomp.ir.run_time_sizes import has_run_time_size
from graphcomp.partition.traits import stays_with_source


@dataclass(frozen=True, order=True)
class Slot:
    """A place in the life of a microbatch: forward of stage 0, 1, ..., n-1, then backward of stage n-1, ..., 0."""

    backward: bool
    stage: int


def place(program: Program, cuts: Sequence[int], forward: Sequence[Node], replicable: set[Node]) -> dict[Node, Slot]:
    """The slot of every node that is not replicable.

    A forward node lies between two cuts. A backward node follows the forward node it differentiates, but never above a
    gradient that it needs; a sum of gradients goes to the lowest stage among its terms.
    """
    slots: dict[Node, Slot] = {}
    stage_of_operation: dict[int, int] = {}
    stage, last = 0, len(cuts)
    for position, node in enumerate(forward):
        while stage < last and position >= cuts[stage]:
            stage += 1
        source = node.all_input_nodes[0] if node.all_input_nodes else None
        tied = source is not None and source in slots and stays_with_source(node)
        own = slots[source].stage if tied and source is not None else stage
        slots[node] = Slot(False, own)
        operation = meta.note(node).operation
        if operation is not None:
            stage_of_operation[operation] = own
    for node in program.calls():
        if node in replicable or node in slots:
            continue
        operation = meta.note(node).operation
        bounds = [slots[n].stage for n in node.all_input_nodes if n in slots and slots[n].backward]
        source = node.all_input_nodes[0] if node.all_input_nodes else None
        tied = source in slots and stays_with_source(node)
        if operation in stage_of_operation and not tied:
            bounds.append(stage_of_operation[operation])
        if not bounds:  # a number made of sizes known at run time only stays where they are
            bounds = [slots[n].stage for n in node.all_input_nodes if n in slots and has_run_time_size(n)]
        slots[node] = Slot(True, min(bounds, default=last))
    _check_buffers(program, slots)
    return slots


def _check_buffers(program: Program, slots: Mapping[Node, Slot]) -> None:
    """Refuse a buffer that one stage writes and another reads as it was before: eager's order cannot be kept."""
    for what, update in program.output_items():
        if not isinstance(what, role.BufferUpdate) or update not in slots:
            continue
        writer = slots[update].stage
        buffer = next((n for r, n in program.input_nodes() if r == role.Buffer(what.name)), None)
        for user in _owned_users(buffer, slots) if buffer is not None else []:
            reader = slots[user].stage
            if reader != writer:
                raise StateError(
                    f"buffer '{what.name}' is written on stage {writer} and read on stage {reader}, "
                    "where the next microbatch would find an old value",
                    where=meta.note(user).source or f"module '{meta.note(user).module}'",
                    do="cut the model so that one stage holds all uses of the buffer (Plan(split=...))",
                )


def _owned_users(node: Node, slots: Mapping[Node, Slot]) -> list[Node]:
    """The nodes with an owner that read a value, directly or through replicable nodes."""
    found, pending, seen = [], list(node.users), set()
    while pending:
        user = pending.pop()
        if user in seen:
            continue
        seen.add(user)
        if user in slots:
            found.append(user)
        elif user.op != "output":
            pending.extend(user.users)
    return found


def split_gradient_sums(program: Program, slots: Mapping[Node, Slot]) -> dict[str, dict[int, list[Node]]]:
    """For each parameter whose gradient autograd sums over several stages: the terms of the sum by stage, in order.

    Such a sum is not computed microbatch by microbatch: each stage accumulates its own terms, and the step adds
    the stages up once at its end.
    """
    found: dict[str, dict[int, list[Node]]] = {}
    for what, node in program.output_items():
        if not isinstance(what, role.Grad) or not isinstance(node, Node) or not meta.note(node).gradient_sum:
            continue
        by_stage: dict[int, list[Node]] = {}
        for term in _terms(node):
            if term not in slots:
                break
            by_stage.setdefault(slots[term].stage, []).append(term)
        else:
            if len(by_stage) > 1:
                found[what.name] = by_stage
    return found


def _terms(node: Node) -> list[Node]:
    """The leaves of a tree of gradient sums, in order of addition."""
    if not meta.note(node).gradient_sum or len(node.all_input_nodes) != 2:
        return [node]
    return [term for part in node.all_input_nodes for term in _terms(part)]
