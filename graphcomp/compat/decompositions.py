"""Decomposition tables, which torch keeps in private modules, and tracing with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from graphcomp.compat.operators import OpOverload

Table = Mapping[Any, Callable[..., Any]]


def inductor_table() -> Table:
    """What Inductor applies before it lowers a graph."""
    from torch._inductor.decomposition import select_decomp_table

    return without_random(select_decomp_table())


def core_table() -> Table:
    """What leads to the core aten operator set."""
    from torch._decomp import core_aten_decompositions

    return without_random(dict(core_aten_decompositions()))


def without_random(table: Table) -> Table:
    """A random operation that is taken apart would draw other numbers than eager does."""
    return {
        target: rule
        for target, rule in table.items()
        if not (isinstance(target, OpOverload) and torch.Tag.nondeterministic_seeded in target.tags)
    }


def trace_with(function: Callable[..., Any], arguments: Sequence[Any], table: Table) -> GraphModule:
    """make_fx over fake arguments with a decomposition table; real tensors become attributes."""
    tracer = make_fx(function, decomposition_table=dict(table), tracing_mode="real", _allow_non_fake_inputs=True)
    return tracer(*arguments)
