"""State: the model's parameters and buffers as fakes, and everything else that user code can reach."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.fx import Node

from graphcomp.capture.functions import entry_points, item, variables
from graphcomp.capture.labels import Labels
from graphcomp.compat import modules as internals
from graphcomp.compat.symbols import FakeTensorMode
from graphcomp.compat.tensor_parallel import axis_of, local_part, over_tensor_ranks, whole_like
from graphcomp.errors import CaptureError, StateError
from graphcomp.ir import meta
from graphcomp.ir import signature as role


@dataclass(frozen=True)
class State:
    """Parameters and buffers of a model, by original name (a tied one once), as fake tensors.

    parts: those that are laid out over tensor ranks, as they are in the model. mesh: the tensor ranks as the plan has
    them; an equal mesh may have other process groups.
    """

    roles: tuple[role.Param | role.Buffer, ...]
    fakes: tuple[torch.Tensor, ...]
    parts: Mapping[str, torch.Tensor] = field(default_factory=dict)
    mesh: DeviceMesh | None = None

    @staticmethod
    def fake(
        model: nn.Module, mode: FakeTensorMode, device: torch.device | None, mesh: DeviceMesh | None = None
    ) -> State:
        """Fakes of the model's state; tensors on meta are given the device on which they will live.

        A parameter whose rows are split over data ranks is whole here; of one that is laid out over tensor ranks it is
        this rank's part. Parameters are made anew, not converted: a fake mode keeps weak references to what it
        converts, and what is referred to cannot be sharded in place later.
        """

        def fake(given: torch.Tensor) -> torch.Tensor:
            tensor = local_part(given)
            plain = (type(tensor) is nn.Parameter or tensor is not given) and tensor.layout is torch.strided
            if tensor.device.type != "meta" and not plain and not isinstance(tensor, DTensor):
                return mode.from_tensor(tensor, static_shapes=True)
            at = given.device if given.device.type != "meta" else device or torch.device("cpu")
            with mode:
                placed = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=at)
            if isinstance(given, nn.Parameter):
                return nn.Parameter(placed, given.requires_grad)
            return placed.requires_grad_(given.requires_grad)

        parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
        roles: list[role.Param | role.Buffer] = [*map(role.Param, parameters), *map(role.Buffer, buffers)]
        state = {**parameters, **buffers}
        parts = {name: tensor for name, tensor in state.items() if over_tensor_ranks(tensor) is not None}
        return State(tuple(roles), tuple(map(fake, state.values())), parts, axis_of(mesh))

    def named(self, values: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        return {what.name: value for what, value in zip(self.roles, values, strict=True)}

    def in_model(self, named: Mapping[str, torch.Tensor], labels: Labels) -> dict[str, torch.Tensor]:
        """What takes the place of the state in the model: DTensors made of the parts of this rank, all else itself."""
        found = dict(named)
        for name, like in self.parts.items():
            labels.module = name.rpartition(".")[0]
            found[name] = whole_like(named[name], like, self.mesh)
        labels.module = None
        return found


@contextlib.contextmanager
def unchanged_model(model: nn.Module) -> Iterator[None]:
    """Restore every module's attributes afterwards, and refuse a forward that rewrites one.

    Buffers may be rebound (their new value is an output of the program); the tracer's fakes never stay behind.
    """
    before = [(name, module, dict(module.__dict__), _contents(module)) for name, module in model.named_modules()]
    try:
        yield
    finally:
        changed = []
        for name, module, attributes, contents in before:
            for key in dict.fromkeys((*module.__dict__, *attributes)):
                now, then = module.__dict__.get(key, _MISSING), attributes.get(key, _MISSING)
                if internals.is_derived(module, key):
                    if then is not _MISSING:
                        module.__dict__[key] = then
                elif now is not then and not _same(now, then):
                    changed.append((f"{name}.{key}".lstrip("."), then, now))
            for key, old in contents.items():
                container = attributes[key]
                if not _holds(container, old):
                    changed.append((f"{name}.{key}".lstrip("."), old, copy.copy(container)))
                    container.clear()
                    (container.extend if isinstance(container, list) else container.update)(old)
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


def _contents(module: nn.Module) -> dict[str, Any]:
    """Copies of the plain containers that a module keeps as attributes, which forward may write into."""
    return {
        key: copy.copy(value)
        for key, value in vars(module).items()
        if type(value) in (list, dict, set) and key not in internals.INTERNAL and not internals.is_derived(module, key)
    }


def _holds(container: Any, old: Any) -> bool:
    """Whether a container still holds the very objects that it did, or equal plain values."""
    if isinstance(container, set):
        return bool(container == old)
    now, then = ([*c.keys(), *c.values()] if isinstance(c, dict) else c for c in (container, old))
    return len(now) == len(then) and all(a is b or _same(a, b) for a, b in zip(now, then, strict=True))


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
    if isinstance(value, (list, tuple, dict, set)):
        return f"a {type(value).__name__} of {len(value)}"
    if isinstance(value, (int, float, str, bool, type(None))):
        return repr(value)[:80]
    return f"an object of {type(value).__name__}"  # whose own text may read tensors, here without contents


@dataclass(frozen=True)
class Captured:
    """A tensor that user code reaches by itself, under the name a user would give it; `read` finds it anew."""

    name: str
    read: Callable[[], Any]


class Reachable:
    """All tensors that the model's attributes and the user's functions can reach, to give them names."""

    def __init__(self, model: nn.Module, loss_fn: Callable[..., Any] | None, training: bool = True) -> None:
        self._found: dict[int, Captured] = {}
        self._training = training
        for name, module in model.named_modules():
            for key in module.__dict__:
                self._add(f"{name}.{key}".lstrip("."), item(module.__dict__, key))
        seen: set[int] = set()
        for function, name in entry_points(model, loss_fn):
            for variable in variables(function, name, seen):
                full = variable.name if variable.kind == "global" else f"{variable.function}.{variable.name}"
                with contextlib.suppress(ValueError, LookupError):  # a cell that is not filled yet
                    self._add(full, variable.read)

    def find(self, tensor: torch.Tensor, node: Node) -> Captured | None:
        """How user code reaches a tensor that `node` stands for; None if it cannot be followed.

        Raises StateError for one that is to be trained: only what the model registers gets a gradient.
        """
        found = self._found.get(id(tensor))
        if found is not None and self._training and tensor.requires_grad:
            user = next(iter(node.users), None)
            raise StateError(
                f"'{found.name}' requires a gradient, but the code does not reach it as a parameter of the model, "
                "so it would get none",
                where=meta.note(user).source if user is not None else None,
                expected="a parameter that the model registers, read as its attribute",
                got="one held by a plain list or dict, a closure or a global",
                do="use nn.ParameterList, nn.ModuleList or an attribute of the model; or requires_grad_(False)",
            )
        return found

    def named(self) -> dict[str, Captured]:
        """All of them, by the names a user would give them."""
        return {captured.name: captured for captured in self._found.values()}

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
            do="register it as a buffer, or pass it as a field of the batch; make a block mask in forward",
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
