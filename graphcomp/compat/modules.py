"""What a module holds besides its public attributes. The tables of a module and of a tensor have no public names."""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

INTERNAL = frozenset(vars(nn.Module())) - {"training"}
"""The attributes that torch itself puts into every module."""

HOOKS = {
    "forward pre-hooks": "_forward_pre_hooks",
    "forward hooks": "_forward_hooks",
    "backward pre-hooks": "_backward_pre_hooks",
    "backward hooks": "_backward_hooks",
}
"""The tables of hooks that run in a training step, by the name a user knows."""

_DERIVED = frozenset({"_flat_weights", "_flat_weight_refs"})


def is_derived(module: nn.Module, attribute: str) -> bool:
    """Whether an attribute only follows from a module's parameters.

    A recurrent layer renews its list when they change; torch's older norms of weights renew the weight at each call.
    """
    if isinstance(module, nn.RNNBase) and attribute in _DERIVED:
        return True
    norms = (hook for hook in module._forward_pre_hooks.values() if isinstance(hook, WeightNorm | SpectralNorm))
    return any(hook.name == attribute for hook in norms)


hooks_of = attrgetter("_backward_hooks")
accumulate_hooks_of = attrgetter("_post_accumulate_grad_hooks")


def has_hooks(tensor: torch.Tensor) -> bool:
    """Whether the user registered a gradient hook or a post-accumulate hook on a tensor."""
    return bool(hooks_of(tensor)) or bool(accumulate_hooks_of(tensor))


def own_parameters(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """The module's own table of parameters, live."""
    return module._parameters  # type: ignore[return-value]


def own_buffers(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """The module's own table of buffers, live."""
    return module._buffers


def tables(module: nn.Module) -> list[Mapping[Any, Any]]:
    """The live tables whose entries matter to a training step: parameters, buffers, children, hooks."""
    own = (module._parameters, module._buffers, module._modules)
    return [*own, *(getattr(module, table) for table in HOOKS.values())]


def hooks(module: nn.Module, kind: str) -> list[Any]:
    """The functions registered on a module, in order; `kind` is a key of `HOOKS`."""
    return list(getattr(module, HOOKS[kind]).values())


def backward_hook_tables(module: nn.Module) -> tuple[dict[Any, Any], ...]:
    """The live tables of the hooks that run in a module's backward."""
    return module._backward_pre_hooks, module._backward_hooks


def global_backward_hook_tables() -> tuple[dict[Any, Any], ...]:
    """The same for hooks of all modules."""
    every = nn.modules.module
    return every._global_backward_pre_hooks, every._global_backward_hooks


def global_hooks() -> tuple[Mapping[Any, Any], ...]:
    """The live tables of hooks that run for all modules."""
    every = nn.modules.module
    return every._global_forward_pre_hooks, every._global_forward_hooks, *global_backward_hook_tables()
