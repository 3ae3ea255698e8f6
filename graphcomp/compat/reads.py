"""The operators that read numbers out of tensors on the host.

`read_numbers(numbers)` yields the elements of an integer tensor as numbers; `read_sum(numbers)` their sum, of a mask
how many are true; `exchange_splits(sent, received, rows)` how many rows an exact exchange brings, then how many go to
each rank, then how many come from each. Real tensors are read in one host synchronisation; for the numbers of fake ones
stand symbols (`fake_reads`).

A sum is an operator of its own so that what is added up is a tensor in memory, the one that places are found in: a
compiler that computed it twice, in two loops, could round it two ways.

All take `relations` between the numbers that they yield and `sizes`: a tracer believes them, a run checks them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import has_side_effect

from graphcomp.compat import fake_reads
from graphcomp.compat.relations import check
from graphcomp.errors import CollectiveError

_LIBRARY = torch.library.Library("graphcomp", "DEF")
_RELATIONS = "SymInt[] sizes=[], str relations=''"
_LIBRARY.define(f"exchange_splits(Tensor sent, Tensor received, SymInt rows, {_RELATIONS}) -> SymInt[]")
_LIBRARY.define(f"read_numbers(Tensor numbers, {_RELATIONS}) -> SymInt[]")
_LIBRARY.define(f"read_sum(Tensor numbers, {_RELATIONS}) -> SymInt[]")
EXCHANGE_SPLITS: OpOverload = torch.ops.graphcomp.exchange_splits.default
"""(sent, received, rows): the rows that come, how many go to each rank, how many come from each. sent sums to rows"""
READ_NUMBERS: OpOverload = torch.ops.graphcomp.read_numbers.default
"""(numbers): the elements of an integer tensor whose own size is a plain number, in order"""
READ_SUM: OpOverload = torch.ops.graphcomp.read_sum.default
"""(numbers): the sum of all elements of a tensor of integers or bools, alone in a list"""
READS = (EXCHANGE_SPLITS, READ_NUMBERS, READ_SUM)
for _read_only in (READ_NUMBERS, READ_SUM):
    has_side_effect(_read_only)  # it checks

Numbers = list[Any]
_syncs = 0


def host_syncs() -> int:
    """How often this process has read numbers out of tensors, such as splits: each time it waited for the device."""
    return _syncs


def _exchange_splits(
    sent: torch.Tensor, received: torch.Tensor, rows: int, sizes: Sequence[int] = (), relations: str = ""
) -> Numbers:
    global _syncs
    _syncs += 1
    given, out = torch.stack([sent.to(torch.int64), received.to(sent.device, torch.int64)]).tolist()
    if min(*given, *out) < 0:
        raise _wrong("a split is negative", "whole numbers from 0", f"{given} and {out}")
    if sum(given) != rows:
        raise _wrong("input_splits do not add up to the rows there are", f"a sum of {rows}", given)
    return check(relations, [sum(out), *given, *out], sizes)


def _read_numbers(numbers: torch.Tensor, sizes: Sequence[int] = (), relations: str = "") -> Numbers:
    global _syncs
    _syncs += 1
    return check(relations, numbers.reshape(-1).tolist(), sizes)


def _read_sum(numbers: torch.Tensor, sizes: Sequence[int] = (), relations: str = "") -> Numbers:
    return _read_numbers(numbers.sum(), sizes, relations)


def _wrong(what: str, expected: object, got: object) -> CollectiveError:
    return CollectiveError(what, where="collectives.all_to_all", expected=expected, got=got)


for _name, _real, _fake in (
    ("exchange_splits", _exchange_splits, fake_reads.exchange_splits),
    ("read_numbers", _read_numbers, fake_reads.read_numbers),
    ("read_sum", _read_sum, fake_reads.read_sum),
):
    _LIBRARY.impl(_name, _real, "CompositeExplicitAutograd")
    torch.library.register_fake(f"graphcomp::{_name}", _fake, lib=_LIBRARY)
