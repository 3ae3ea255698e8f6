"""Sizes that are known at run time only, as against those that a program is given."""

from __future__ import annotations

import itertools

import torch
from torch.fx import Node

from graphcomp.compat.run_time_sizes import is_run_time, is_run_time_name
from graphcomp.ir import meta, spelling


def has_run_time_size(node: Node) -> bool:
    """Whether a node computes such a size, or a tensor of one; those that the graph's inputs give are none."""
    found = meta.value(node)
    if not is_run_time(found):
        return False
    inputs = itertools.takewhile(lambda one: one.op == "placeholder", node.graph.nodes)
    numbers = (value for value in map(meta.value, inputs) if isinstance(value, torch.SymInt))
    given = {symbol for number in numbers for symbol in spelling.free_symbols(number)}
    return any(is_run_time_name(str(symbol)) and symbol not in given for symbol in spelling.free_symbols(found))
