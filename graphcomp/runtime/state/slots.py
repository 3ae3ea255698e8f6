"""The places of a model's parameters and buffers: where each stands first, and where else if it is tied."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from graphcomp.compat.modules import own_buffers, own_parameters


@dataclass(frozen=True, eq=False)
class Slot:
    """The first place of a parameter or buffer: its name, its module's, and the table that holds it."""

    name: str
    module: str
    owner: nn.Module
    table: dict[str, Any]
    key: str
    tensor: torch.Tensor

    @property
    def what(self) -> str:
        kind = "parameter" if isinstance(self.tensor, nn.Parameter) else "buffer"
        return f"{kind} '{self.name}' of {type(self.owner).__name__}"


def slots_of(model: nn.Module) -> list[Slot]:
    """One for each parameter and buffer, in the model's order; a tied one at its first place only."""
    seen: set[int] = set()
    found: list[Slot] = []
    for path, module in model.named_modules():
        for table in (own_parameters(module), own_buffers(module)):
            for key, tensor in table.items():
                if tensor is not None and id(tensor) not in seen:
                    seen.add(id(tensor))
                    found.append(Slot(f"{path}.{key}".lstrip("."), path, module, table, key, tensor))
    return found


def is_on_meta(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "meta"


def further_places(model: nn.Module, slots: list[Slot]) -> list[tuple[dict[str, Any], str, torch.Tensor]]:
    """Where tied tensors stand besides: tables with a key and what it holds."""
    first = {(id(slot.table), slot.key) for slot in slots}
    tables = [table for module in model.modules() for table in (own_parameters(module), own_buffers(module))]
    return [(t, k, one) for t in tables for k, one in t.items() if one is not None and (id(t), k) not in first]


def stand_in(tensor: torch.Tensor, anew: bool = False) -> torch.Tensor:
    """The tensor itself if it is plain and on meta; otherwise, or if it is to be another, one of its form that is."""
    if is_on_meta(tensor) and not anew and not isinstance(tensor, DTensor):
        return tensor
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made
