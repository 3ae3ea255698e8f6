"""Fake tensors, symbolic numbers and operators, taken apart into plain values and put together again. torch's own means
for that have private names; ours needs no more than what a program holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sympy
import torch
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.symbolic_shapes import ShapeEnv, ValueRangesSLoc
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.value_ranges import ValueRanges

from graphcomp.compat.estimates import adopt_guesses, guesses
from graphcomp.compat.symbols import FakeTensorMode, new_fake_mode

Reduced = tuple[Any, tuple[Any, ...]]
"""What a pickler writes for an object: a function, and its arguments."""


def reduced(value: object) -> Reduced | None:
    """How one of these objects is made anew; None for any other object."""
    match value:
        case OpOverload():
            name = str(value._schema.name)
            return _operator, (*name.split("::", 1), str(value._overloadname))
        case HigherOrderOperator():
            return _higher_order, (value.name(),)
        case FakeTensor():
            shape, strides = tuple(value.shape), tuple(value.stride())
            form = (shape, strides, value.storage_offset(), value.dtype, value.fake_device, value.requires_grad)
            return _tensor, (value.fake_mode, form, isinstance(value, torch.nn.Parameter))
        case FakeTensorMode():
            return _mode, (value.shape_env,)
        case ShapeEnv():
            ranges = {symbol: (_plain(b.lower), _plain(b.upper)) for symbol, b in value.var_to_range.items()}
            hints = {symbol: int(n) for symbol, n in value.backed_var_to_val.items()}
            return _environment, (ranges, hints, guesses(value))
        case torch.SymInt() | torch.SymFloat() | torch.SymBool():
            node = value.node
            return _number, (node.shape_env, type(value).__name__, node.expr, node.hint)
    return None


def _operator(namespace: str, name: str, overload: str) -> object:
    return getattr(getattr(getattr(torch.ops, namespace), name), overload)


def _higher_order(name: str) -> object:
    return getattr(torch.ops.higher_order, name)


def _tensor(mode: FakeTensorMode, form: tuple[Any, ...], is_parameter: bool) -> torch.Tensor:
    shape, strides, offset, dtype, device, requires_grad = form
    with torch.no_grad():  # on meta, and not under the fake mode, which would look each of them up in its tables
        if isinstance(offset, int) and offset == 0:
            made = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
        else:
            extent = offset + 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
            made = torch.empty(extent, dtype=dtype, device="meta").as_strided(shape, strides, offset)
        fake = FakeTensor(mode, made, device)
    return torch.nn.Parameter(fake, requires_grad) if is_parameter else fake.requires_grad_(requires_grad)


def _mode(environment: ShapeEnv) -> FakeTensorMode:
    mode = new_fake_mode()
    mode.shape_env = environment
    return mode


def _environment(
    ranges: Mapping[sympy.Symbol, tuple[Any, Any]],
    hints: Mapping[sympy.Symbol, int],
    guessed: Mapping[sympy.Symbol, int],
) -> ShapeEnv:
    environment: Any = new_fake_mode().shape_env
    place = environment._get_sloc()
    for symbol, (lower, upper) in ranges.items():
        bounds = ValueRanges(-int_oo if lower is None else lower, int_oo if upper is None else upper)
        environment.var_to_range[symbol] = bounds
        environment.var_to_range_sloc[symbol] = ValueRangesSLoc(place, place)  # which Inductor's cache asks for
    environment.backed_var_to_val.update({symbol: sympy.Integer(hint) for symbol, hint in hints.items()})
    adopt_guesses(environment, guessed)
    return environment


def _number(environment: Any, kind: str, expression: sympy.Basic, hint: Any) -> object:
    match kind:
        case "SymInt":
            return environment.create_symintnode(expression, hint=hint)
        case "SymFloat":
            return environment.create_symfloatnode(expression, hint=hint)
    return environment.create_symboolnode(expression)


def _plain(bound: Any) -> int | None:
    """None for an infinity."""
    return None if bound in (int_oo, -int_oo) else int(bound)
