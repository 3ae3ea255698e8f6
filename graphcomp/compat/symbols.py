"""Symbolic sizes. The shape environment, its guards and torch's printers of sympy have no public names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch._dynamo.source import LocalSource
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    GuardOnDataDependentSymNode,
    ShapeEnv,
    StatelessSymbolicContext,
)
from torch.utils._sympy.numbers import int_oo

from graphcomp.compat.fakes import TracingMode

__all__ = [
    "FakeTensorMode",
    "conditions",
    "expression",
    "fake_batch_leaf",
    "new_fake_mode",
]


def new_fake_mode() -> FakeTensorMode:
    """A fake mode whose shape environment does not tie equal sizes together.

    Numbers and shapes that depend on the contents of a tensor are refused at once. Real tensors may enter: they
    become attribute nodes, which the capture then lifts or refuses by name.
    """
    env = ShapeEnv(duck_shape=False, allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False)
    return TracingMode(shape_env=env, allow_non_fake_inputs=True)


def fake_batch_leaf(mode: FakeTensorMode, leaf: torch.Tensor, name: str) -> torch.Tensor:
    """A fake of one batch tensor in which every dimension is a symbol of its own (sizes 0 and 1 stay numbers)."""
    context: Any = StatelessSymbolicContext(
        dynamic_sizes=[DimDynamic.DYNAMIC] * leaf.dim(), constraint_sizes=[None] * leaf.dim()
    )
    # Detached: the same tensor in two fields would become one input, and serve a batch where they differ wrongly.
    # At the beginning of its memory: where a part of another tensor begins would become a symbol, of which compilers
    # ask and no microbatch tells.
    own = torch.empty_like(leaf) if leaf.storage_offset() else leaf.detach()
    return mode.from_tensor(own, symbolic_context=context, source=LocalSource(name))


def expression(mode: FakeTensorMode, number: object) -> sympy.Expr | int:
    """The simplified expression of a symbolic number or a plain integer; symbols the trace has equated are merged."""
    if isinstance(number, torch.SymInt | torch.SymFloat | torch.SymBool):
        found = mode.shape_env.replace(number.node.expr)  # type: ignore[union-attr]
        return int(found) if found.is_Integer else found
    return int(number)  # type: ignore[call-overload]


def symbol_names(expressions: Sequence[object]) -> set[str]:
    """The names of all symbols in the expressions."""
    return {str(s) for e in expressions if isinstance(e, sympy.Basic) for s in e.free_symbols}


def is_asked_about(mode: FakeTensorMode, leaf: torch.Tensor) -> bool:
    """Whether a decision of the trace depended on a size of this batch tensor, so that a guard names its symbol."""
    env: Any = mode.shape_env
    # As they were made: a size that the trace has fixed or equated is replaced in `size.node.expr`.
    shape: Sequence[Any] = leaf.shape
    raw = [size.node._expr for size in shape if isinstance(size, torch.SymInt)]
    own = symbol_names(raw)
    return any(own & symbol_names([guard.expr]) for guard in env.guards)


def conditions(mode: FakeTensorMode, symbols: set[str], start: int = 0) -> tuple[sympy.Basic, ...]:
    """All that the shape environment assumes of these symbols: its guards from number `start` on, and the ranges."""
    env: Any = mode.shape_env
    found: dict[sympy.Basic, None] = {}
    for guard in env.guards[start:]:
        relation = env.replace(guard.expr)
        if relation.free_symbols and {str(s) for s in relation.free_symbols} <= symbols:
            found[relation] = None
    for symbol, bounds in env.var_to_range.items():
        if str(symbol) in symbols:
            if bounds.lower > 0:
                found[sympy.Ge(symbol, bounds.lower, evaluate=False)] = None
            if bounds.upper < int_oo and int(bounds.upper) < 2**62:
                found[sympy.Le(symbol, bounds.upper, evaluate=False)] = None
    return tuple(found)


def guard_count(mode: FakeTensorMode) -> int:
    """How many guards the shape environment holds so far."""
    env: Any = mode.shape_env
    return len(env.guards)


def fails_in_the_example(mode: FakeTensorMode, relation: sympy.Basic) -> bool:
    """Whether a relation does not hold for the sizes that the mode's symbols had in the example microbatch."""
    env: Any = mode.shape_env
    return bool(relation.xreplace(dict(env.backed_var_to_val)) == sympy.false)


def size_value(like: object, number: sympy.Expr, fraction: bool = False) -> object:
    """A symbolic integer for an expression, in the shape environment of another one. fraction: a symbolic float."""
    if not isinstance(like, torch.SymInt):
        raise TypeError(f"expected a symbolic integer, got {type(like).__name__}")
    env = like.node.shape_env
    return env.create_symfloatnode(number, hint=None) if fraction else env.create_symintnode(number, hint=None)


DATA_DEPENDENT = (DataDependentOutputException, DynamicOutputShapeException)
"""What fake tensors raise when code asks for the contents of a tensor."""
ASKS_SIZE = GuardOnDataDependentSymNode
"""What is raised when code asks for a size that is known at run time only (see `compat.run_time_sizes`)."""


HAS_NO_FAKE = UnsupportedOperatorException
"""What fake tensors raise for an operator whose results they cannot foretell."""


def asked_operator(error: BaseException) -> str:
    """The operator, without its overload, that could not answer; empty if a number was asked for otherwise."""
    operator = getattr(error, "func", None)
    return operator.name().partition(".")[0] if isinstance(operator, OpOverload) else ""
