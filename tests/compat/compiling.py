"""Functions of one tensor, compiled with both of its sizes as symbols."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from graphcomp.compat.inductor import CompiledCode, compile_graph
from graphcomp.compat.symbolic_sizes import symbolic_bodies
from graphcomp.compat.symbols import FakeTensorMode, fake_batch_leaf, guard_count, new_fake_mode
from graphcomp.ir.interp import as_written

Function = Callable[[Tensor], Sequence[Tensor]]


def compiled(function: Function, rows: int = 6) -> tuple[CompiledCode, FakeTensorMode, int]:
    """The code, and how many guards there were before it was compiled."""
    mode = new_fake_mode()
    x = fake_batch_leaf(mode, torch.randn(rows, 4), "x")
    with mode, symbolic_bodies():
        module = make_fx(function, tracing_mode="real")(x)
    before = guard_count(mode)
    with as_written():
        return compile_graph(module, [x], mode), mode, before


def symbols_of(mode: FakeTensorMode) -> set[str]:
    return {str(symbol) for symbol in mode.shape_env.backed_var_to_val}  # type: ignore[union-attr]
