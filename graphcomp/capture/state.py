"""State: the model's parameters and buffers as fakes, and everything else that user code can reach."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import Node

from graphcomp.capture.functions import entry_points, item, variables
from graphcomp.compat import modules as internals
from graphcomp.compat.symbols import FakeTensorMode
from graphcomp.errors import CaptureError, StateError
from graphcomp.ir import meta
from graphcomp.ir import signature as role


@dataclass(frozen=True)
class State:
    """Parameters and buffers of a model, by original name (a tied one once), as fake tensors."""

    roles: tuple[role.Param | role.Buffer, ...]
    fakes: tuple[torch.Tensor, ...]

    @staticmethod
    def fake(model: nn.Module, mode: FakeTensorMode, device: torch.device | None) -> State:
        """Fakes of the model's state; tensors on meta are given the device on which they will live."""

        def fake(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.device.type != "meta":
                return mode.from_tensor(tensor, static_shapes=True)
            with mode:
                placed = torch.empty_strided(
                    tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device or torch.device("cpu")
                )
            return placed.requires_grad_(tensor.requires_grad)

        parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
        roles: list[role.Param | role.Buffer] = [*map(role.Param, parameters), *map(role.Buffer, buffers)]
        return State(tuple(roles), tuple(map(fake, (*parameters.values(), *buffers.values()))))

    def named(self, values: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        return {what.name: value for what, value in zip(self.roles, values, strict=True)}


@contextlib.contextmanager
def unchanged_model(model: nn.Module) -> Iterator[None]:
    """Restore every module's attributes afterwards, and refuse a forward that rewrites one.

    Buffers may be rebound (their new value is an output of the program); the tracer's fakes never stay behind.
    """
    before = [(name, module, dict(module.__dict__)) for name, module in model.named_modules()]
    try:
        yield
    finally:
        changed = []
        for name, module, attributes in before:
            for key in module.__dict__.keys() | attributes.keys():
                now, then = module.__dict__.get(key, _MISSING), attributes.get(key, _MISSING)
                if now is not then and not _same(now, then) and not internals.is_derived(module, key):
                    changed.append((f"{name}.{key}".lstrip("."), then, now))
            if changed:
                module.__dict__.clear()
                module.__dict__.update(attributes)
    if changed:
        path, then, now = changed[0]
        raise StateError(
            f"the model's forward rewrites its attribute '{path}', which a compiled step would not repeat",
            where=type(model).__name__,
            expected=_brief(then),
            got=_brief(now),
            do="make it a buffer (register_buffer), return it as an output, or do it outside of forward",
        )


_MISSING = object()


def _same(now: object, then: object) -> bool:
    """Equal plain values are no change; of everything else only the same object is."""
    plain = (int, float, str, bool, type(None), tuple)
    return type(now) is type(then) and isinstance(now, plain) and now == then


def _brief(value: object) -> str:
    if value is _MISSING:
        return "no such attribute"
    if isinstance(value, torch.Tensor):
        return f"tensor of shape {tuple(value.shape)}"
    return repr(value)[:80]


@dataclass(frozen=True)
class Captured:
    """A tensor that user code reaches by itself, under the name a user would give it; `read` finds it anew."""

    name: str
    read: Callable[[], Any]


class Reachable:
    """All tensors that the model's attributes and the user's functions can reach, to give them names."""

    def __init__(self, model: nn.Module, loss_fn: Callable[..., Any] | None) -> None:
        self._found: dict[int, Captured] = {}
        for name, module in model.named_modules():
            for key in module.__dict__:
                self._add(f"{name}.{key}".lstrip("."), item(module.__dict__, key))
        seen: set[int] = set()
        for function, name in entry_points(model, loss_fn):
            for variable in variables(function, name, seen):
                full = variable.name if variable.kind == "global" else f"{variable.function}.{variable.name}"
                with contextlib.suppress(ValueError, LookupError):  # a cell that is not filled yet
                    self._add(full, variable.read)

    def find(self, tensor: torch.Tensor) -> Captured | None:
        return self._found.get(id(tensor))

    def require_literal(self, node: Node) -> None:
        """Refuse a tensor that is reached in a way nobody can follow from step to step."""
        literal = (torch.ops.aten.lift_fresh_copy.default, torch.ops.aten.lift_fresh.default)
        user = next(iter(node.users), None)
        if all(u.target in literal for u in node.users):
            return
        raise CaptureError(
            "the code uses a tensor that is neither in the model's state nor in the batch",
            where=meta.note(user).source if user is not None else None,
            expected="a parameter, a buffer, a batch field, or a tensor held by a closure, a global or an attribute",
            do="register it as a buffer of the model or pass it with the batch",
        )

    def _add(self, name: str, read: Callable[[], Any]) -> None:
        value = read()
        if isinstance(value, torch.Tensor):
            if value.requires_grad and not isinstance(value, nn.Parameter):
                return
            self._found.setdefault(id(value), Captured(name, read))
        elif isinstance(value, (list, tuple)) and len(value) <= 4096:
            for index in range(len(value)):
                self._add(f"{name}[{index}]", item(value, index))
        elif isinstance(value, dict) and len(value) <= 4096 and not name.startswith("_"):
            for key in value:
                self._add(f"{name}[{key!r}]", item(value, key))
