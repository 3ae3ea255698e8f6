"""The model's live state: parameters and buffers by original name, read anew at each step, written once at its end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from graphcomp.errors import StateError, StepError


class LiveState:
    """Looks parameters and buffers up where the modules keep them, without walking over the modules each time."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.refresh()

    def refresh(self) -> None:
        """Find the places again, after modules or parameters were added or removed."""
        self._parameters = _places(self.model, "_parameters", [name for name, _ in self.model.named_parameters()])
        self._buffers = _places(self.model, "_buffers", [name for name, _ in self.model.named_buffers()])
        self._overlaps = _overlaps({**self.parameters(), **self.buffers()})

    def parameters(self) -> dict[str, torch.Tensor]:
        return {name: table[key] for name, (table, key) in self._parameters.items()}

    def buffers(self) -> dict[str, torch.Tensor]:
        return {name: table[key] for name, (table, key) in self._buffers.items()}

    def commit(self, gradients: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor]) -> None:
        """Add gradients to `.grad` and write buffers. The last act of a step.

        Raises StateError, before any effect, for a written buffer that is a view of other state: programs take the two
        for independent.
        """
        for name in buffers:
            if name in self._overlaps:
                raise StateError(
                    f"buffer '{name}' is written in forward and shares memory with '{self._overlaps[name]}'",
                    expected="written buffers with memory of their own",
                    do="register a clone, or make the view in forward",
                )
        with torch.no_grad():
            for name, gradient in gradients.items():
                table, key = self._parameters[name]
                parameter = table[key]
                if gradient.dtype != parameter.dtype:
                    gradient = gradient.to(parameter.dtype)
                if parameter.grad is None:
                    parameter.grad = gradient
                else:
                    parameter.grad.add_(gradient)
            targets = {name: self._buffers[name][0][self._buffers[name][1]] for name in buffers}
            memory = {target.untyped_storage().data_ptr() for target in targets.values()}
            # A new value may be another buffer as it was (a swap, a previous value): kept before that one is written.
            kept = {
                name: value.clone() if value.untyped_storage().data_ptr() in memory else value
                for name, value in buffers.items()
            }
            for name, target in targets.items():
                target.copy_(kept[name])

    def require_real(self, names: set[str]) -> None:
        """Refuse to run on parameters that have no memory yet."""
        for name, tensor in {**self.parameters(), **self.buffers()}.items():
            if name in names and tensor.device.type == "meta":
                raise StepError(
                    f"'{name}' is still on the meta device",
                    do="materialise the model before the first step: model.to_empty(device=...) and initialise it",
                )


def _places(model: nn.Module, table: str, names: list[str]) -> dict[str, tuple[dict[str, Any], str]]:
    found = {}
    for name in names:
        path, _, key = name.rpartition(".")
        found[name] = (getattr(model.get_submodule(path), table), key)
    return found


def _overlaps(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Tensors that share memory with another one, by name, with the other's name."""
    memory: dict[int, list[tuple[int, int, str]]] = {}
    for name, tensor in tensors.items():
        if tensor.device.type != "meta" and tensor.numel() and tensor.layout is torch.strided:
            extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            begin = tensor.data_ptr()
            block = memory.setdefault(tensor.untyped_storage().data_ptr(), [])
            block.append((begin, begin + extent * tensor.element_size(), name))
    found: dict[str, str] = {}
    for block in memory.values():
        for begin, end, name in block:
            for other_begin, other_end, other in block:
                if name != other and begin < other_end and other_begin < end:
                    found.setdefault(name, other)
    return found
