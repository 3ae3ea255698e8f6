"""Runs a program on all ranks of one mesh axis at once, in this process: the oracle of everything collective."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node

from graphcomp.compat import collective_operators as ops
from graphcomp.errors import VerifyError
from graphcomp.ir.calls import arguments
from graphcomp.ir.collective_calls import axis_of
from graphcomp.ir.interp import as_written, evaluate, last_uses
from graphcomp.ir.program import Program

Calls = Sequence[Mapping[str, Any]]
"""The arguments of one collective, by name, on every rank."""


def lockstep(program: Program, axis: str, boxes: Sequence[list[Any]]) -> list[tuple[Any, ...]]:
    """What the program returns on every rank of `axis`.

    boxes: for each rank its inputs in the order of the signature. The lists are emptied, so that each input, as each
        value in between, is freed after its last use.

    Node by node: a collective over `axis` is computed for all ranks together, every other node rank by rank. Sums are
    taken in the order of the ranks, in the dtype of the values. Sizes are ints.

    Raises VerifyError for a collective over another axis or of another kind, and where ranks do not fit together.
    """
    if not boxes:
        raise VerifyError(f"program '{program.name}' has no rank to run on", expected="inputs of 1 rank or more", got=0)
    count = len(program.inputs)
    for rank, box in enumerate(boxes):
        if len(box) != count:
            where = f"rank {rank} of axis '{axis}'"
            raise VerifyError(
                f"program '{program.name}' takes {count} inputs", where=where, expected=count, got=len(box)
            )
    values = [dict(zip(program.placeholders, box, strict=True)) for box in boxes]
    for box in boxes:
        box.clear()
    last = last_uses(program)
    for node in (*program.placeholders, *program.calls()):
        if node.op != "placeholder":
            _step(program, node, axis, values)
        for done in last.get(node, ()):
            for known in values:
                del known[done]
    return [tuple(None if node is None else known[node] for node in program.results) for known in values]


def _step(program: Program, node: Node, axis: str, values: Sequence[dict[Node, Any]]) -> None:
    over = axis_of(node)
    if over is None:
        for known in values:
            known[node] = evaluate(node, known)
        return
    where = f"program '{program.name}', node '{node.name}'"
    if over != axis:
        raise VerifyError("a collective runs over another axis", where=where, expected=axis, got=over)
    if node.target not in _RULES:
        listed = ", ".join(str(target) for target in _RULES)
        raise VerifyError("this collective has no rule here", where=where, expected=listed, got=node.target)
    calls = [arguments(node, known.__getitem__) for known in values]
    with as_written():
        results = _RULES[node.target](calls, where)
    for known, result in zip(values, results, strict=True):
        known[node] = result


def _all_reduce(calls: Calls, where: str) -> list[torch.Tensor]:
    total = _reduce(_alike(calls, where), calls[0]["reduce_op"], where)
    return [total, *(total.clone() for _ in calls[1:])]


def _all_gather(calls: Calls, where: str) -> list[torch.Tensor]:
    _same_size(calls, where)
    parts = _alike(calls, where)
    return [torch.cat(parts) for _ in calls]


def _reduce_scatter(calls: Calls, where: str) -> list[torch.Tensor]:
    _same_size(calls, where)
    parts = _alike(calls, where)
    rows, ranks = parts[0].shape[0], len(calls)
    if rows % ranks:
        raise VerifyError("an input does not divide among the ranks", where=where, expected=f"k * {ranks}", got=rows)
    total = _reduce(parts, calls[0]["reduce_op"], where)
    return [part.clone() for part in total.split(rows // ranks)] if rows else [total.clone() for _ in calls]


def _all_to_all(calls: Calls, where: str) -> list[torch.Tensor]:
    sent = [list(call["input_split_sizes"]) for call in calls]
    received = [list(call["output_split_sizes"]) for call in calls]
    for rank, splits in enumerate(sent):
        arriving = [sizes[rank] for sizes in sent if len(sizes) == len(calls)]
        if received[rank] != arriving or sum(splits) != calls[rank]["input"].shape[0]:
            what = f"the splits of rank {rank} do not fit what is sent"
            raise VerifyError(what, where=where, expected=arriving, got=f"{received[rank]}, sends {splits}")
    parts = [call["input"].split(splits) for call, splits in zip(calls, sent, strict=True)]
    return [torch.cat([part[rank] for part in parts]) for rank in range(len(calls))]


def _broadcast(calls: Calls, where: str) -> list[torch.Tensor]:
    source = _alike(calls, where)[calls[0]["src"]]
    return [source.clone(memory_format=torch.contiguous_format) for _ in calls]


_RULES: Mapping[Any, Callable[[Calls, str], list[torch.Tensor]]] = {
    ops.ALL_REDUCE: _all_reduce,
    ops.ALL_GATHER: _all_gather,
    ops.REDUCE_SCATTER: _reduce_scatter,
    ops.ALL_TO_ALL: _all_to_all,
    ops.BROADCAST: _broadcast,
}
_PAIRWISE: Mapping[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "product": torch.mul,
    "max": torch.maximum,
    "min": torch.minimum,
}


def _reduce(parts: Sequence[torch.Tensor], op: str, where: str) -> torch.Tensor:
    """One rank's term after the other, in a new tensor."""
    if op not in _PAIRWISE or (op == "avg" and not parts[0].dtype.is_floating_point):
        got = f"{op} of {parts[0].dtype}"
        raise VerifyError("this reduction has no rule here", where=where, expected=", ".join(_PAIRWISE), got=got)
    total = parts[0].clone(memory_format=torch.contiguous_format)
    for part in parts[1:]:
        total = _PAIRWISE[op](total, part)
    return total / len(parts) if op == "avg" else total


def _alike(calls: Calls, where: str) -> list[torch.Tensor]:
    """The inputs of all ranks, which must have one shape and dtype."""
    parts = [call["input"] for call in calls]
    for rank, part in enumerate(parts):
        if (part.shape, part.dtype) != (parts[0].shape, parts[0].dtype):
            expected, got = (f"{p.dtype} {list(p.shape)}" for p in (parts[0], part))
            what = f"ranks 0 and {rank} give a collective different tensors"
            raise VerifyError(what, where=where, expected=expected, got=got)
    return parts


def _same_size(calls: Calls, where: str) -> None:
    if calls[0]["group_size"] != len(calls):
        got = calls[0]["group_size"]
        raise VerifyError("a collective counts another number of ranks", where=where, expected=len(calls), got=got)
