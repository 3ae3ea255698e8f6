"""Operators that return nothing: what becomes of them while something is captured.

Those that check tensors stay in the program. What is said of sizes is a guard instead, for compiled code leaves it out,
and marks of the profiler are left out, for a step marks its own actions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph

from graphcomp.compat.believed import rely_on
from graphcomp.compat.operators import OpOverload, is_kept_by_torch, target_name
from graphcomp.errors import CaptureError
from graphcomp.ir import meta
from graphcomp.ir.effects import is_check
from graphcomp.ir.program import Program

aten = torch.ops.aten


def _assert_async(condition: torch.Tensor) -> None:
    """The form with a text, which Inductor has; the text is eager PyTorch's."""
    aten._assert_async.msg(condition, "Expected Tensor with single nonzero value, but got zero")


def _functional_assert_async(condition: torch.Tensor, text: str, token: torch.Tensor) -> torch.Tensor:
    """The form that stays though nobody reads its result."""
    aten._assert_async.msg(condition, text)
    return token.clone()


def _assert_scalar(condition: Any, text: str) -> None:
    rely_on(condition, lambda: text)


def _constrain_range(size: Any, *, min: int | None = None, max: int | None = None) -> None:
    if min is not None:
        rely_on(size >= min, lambda: f"{size} is less than {min}")
    if max is not None:
        rely_on(size <= max, lambda: f"{size} is more than {max}")


CHECKS: dict[OpOverload, Callable[..., Any]] = {
    aten._assert_async.default: _assert_async,
    aten._functional_assert_async.msg: _functional_assert_async,
    aten._assert_scalar.default: _assert_scalar,
    aten.sym_constrain_range.default: _constrain_range,
    aten.sym_constrain_range_for_size.default: _constrain_range,
}
"""By operator: what is done in its place."""


def leave_out_profiling(graph: Graph) -> None:
    """Erase what `record_function` makes: a handle, and the end of the mark."""
    for node in reversed(graph.nodes):
        if target_name(node.target).startswith("profiler::_record_function"):
            graph.erase_node(node)


def check_kept(program: Program) -> None:
    """Refuse an operator without a result that torch does not know to have an effect: compiled code would lack it."""
    for node in program.calls():
        if is_check(node) and isinstance(node.target, OpOverload) and not is_kept_by_torch(node.target):
            name = str(node.target)
            raise CaptureError(
                f"operator '{name}' returns nothing, and Inductor removes what has no result",
                where=", ".join(meta.place(node)) or None,
                do=f"let it return a tensor that the code goes on with, or say that it has an effect: "
                f"torch.fx.has_side_effect(torch.ops.{name})",
            )
