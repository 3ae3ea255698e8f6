"""What a model keeps, by the names of its `state_dict()`, and which of it this rank owns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from graphcomp.errors import CheckpointError
from graphcomp.runtime.state.slots import slots_of

if TYPE_CHECKING:
    from graphcomp.step import CompiledStep

_EXTRA_STATE = "_extra_state"
"""What `nn.Module.state_dict` calls what `get_extra_state` returned, behind the module's name."""


def is_extra_state(key: str) -> bool:
    return key.rpartition(".")[2] == _EXTRA_STATE


@dataclass(frozen=True, eq=False)
class Entry:
    """A parameter or buffer. name: its first one, by which programs know it.

    keys: its names in `state_dict()`, several if it is tied; none for a buffer that is not persistent.
    """

    name: str
    keys: tuple[str, ...]
    tensor: torch.Tensor
    owned: bool


@dataclass(frozen=True)
class Entries:
    """All of a model. extra_state: what modules keep besides tensors."""

    tensors: tuple[Entry, ...]
    extra_state: Mapping[str, Any]

    @property
    def owned(self) -> list[Entry]:
        return [one for one in self.tensors if one.owned]

    @property
    def keys(self) -> set[str]:
        """Of the tensors."""
        return {key for one in self.tensors for key in one.keys}


def entries(step: CompiledStep) -> Entries:
    """Raises StepError if it is not known yet what this rank owns, CheckpointError for a value that is no state."""
    owns = step.owner()
    keys: dict[int, list[str]] = {}
    extra_state: dict[str, Any] = {}
    slots = slots_of(step.model)
    known = {id(slot.tensor) for slot in slots}
    for key, value in step.model.state_dict(keep_vars=True).items():
        if id(value) in known:
            keys.setdefault(id(value), []).append(key)
        elif is_extra_state(key):
            extra_state[key] = value
        else:
            raise CheckpointError(
                f"state_dict() of the model holds '{key}', which is neither a parameter nor a buffer of it",
                got=type(value).__name__,
                do="return it from get_extra_state(), or leave it out of the hook that puts it there",
            )
    tensors = (Entry(s.name, tuple(keys.get(id(s.tensor), ())), s.tensor, owns(s.name)) for s in slots)
    return Entries(tuple(tensors), extra_state)


def set_extra_state(model: nn.Module, values: Mapping[str, Any]) -> None:
    for key, value in values.items():
        model.get_submodule(key.rpartition(".")[0]).set_extra_state(value)


def owned_state(step: CompiledStep) -> dict[str, Any]:
    """As `model.state_dict()` has it, what this rank owns of it."""
    held = entries(step)
    step.engine.state.require_real([one.name for one in held.owned])
    found = {key: one.tensor.detach() for one in held.owned for key in one.keys} | dict(held.extra_state)
    return {key: found[key] for key in step.model.state_dict(keep_vars=True) if key in found}
