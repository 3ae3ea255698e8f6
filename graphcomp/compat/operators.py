"""Operators. Their classes and schemas have no public names, yet a graph's targets are nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._library.utils import is_impure
from torch._ops import HigherOrderOperator, OpOverload
from torch.utils.flop_counter import flop_registry

__all__ = [
    "CAST",
    "HigherOrderOperator",
    "OpOverload",
    "argument_names",
    "flop_formula",
    "is_kept_by_torch",
    "is_mutable",
    "returns_nothing",
    "target_name",
]

CAST = torch.ops.aten._to_copy
"""Another dtype, device or memory format."""

_FLASH = torch.ops.aten._scaled_dot_product_flash_attention
_FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_backward
# torch counts the FLOPs of these kernels' siblings only, which take the same arguments in front.
_COUNTED_AS = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _FLASH,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _FLASH_BACKWARD,
    torch.ops.aten._scaled_dot_product_fused_attention_overrideable: _FLASH,
    torch.ops.aten._scaled_dot_product_fused_attention_overrideable_backward: _FLASH_BACKWARD,
}


def argument_names(target: OpOverload) -> list[str]:
    """The names of an operator's arguments, in order."""
    schema: Any = target._schema
    return [argument.name for argument in schema.arguments]


def target_name(target: object) -> str:
    """`namespace::name` of an operator, without its overload; empty for other targets."""
    return target.name().partition(".")[0] if isinstance(target, OpOverload) else ""


def is_mutable(target: OpOverload) -> bool:
    """Whether the operator's schema says that it writes to an argument."""
    schema: Any = target._schema
    return bool(schema.is_mutable)


def returns_nothing(target: object) -> bool:
    """Whether a call of an operator neither yields nor writes anything: it checks, or acts outside of the program."""
    return isinstance(target, OpOverload) and not target._schema.returns and not is_mutable(target)


def is_kept_by_torch(target: OpOverload) -> bool:
    """Whether torch knows that a call has an effect; Inductor removes others whose results nobody reads."""
    return is_impure(target)


def flop_formula(target: object) -> Callable[..., int] | None:
    """torch's count of an operator's floating-point operations; None for what it does not count."""
    packet: Any = target.overloadpacket if isinstance(target, OpOverload) else target
    return flop_registry.get(_COUNTED_AS.get(packet, packet))
