"""Guards: what besides the batch decides whether a captured program may be used again, checked on the host."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from operator import is_, itemgetter
from typing import Any

import torch
from torch import nn

from graphcomp.capture.facts import Facts, Subject, TensorFacts, difference
from graphcomp.capture.functions import entry_points, hook_entries, plain_function, variables
from graphcomp.capture.state import Captured
from graphcomp.capture.values import Watched, freeze
from graphcomp.capture.variables import WATCHED, held_in
from graphcomp.compat import modules as internals
from graphcomp.compat import tensor_parallel
from graphcomp.compat.tensor_forms import form_check
from graphcomp.errors import GuardError

_UNSET = object()


class ModelGuard:
    """Watches a model and its loss function for whatever a program was specialised on.

    Followed: the classes, forwards, modes, hooks and plain attributes of modules; names and form of parameters and
    buffers; plain closure variables, defaults and globals of the loss function, of the forwards and of the user's
    functions they reach; autocast, default dtype, deterministic mode and attention kernels.

    device: where parameters on meta will live, so that materialising them changes nothing.
    """

    def __init__(
        self, model: nn.Module, loss_fn: Callable[..., Any] | None, device: torch.device | None = None
    ) -> None:
        self._model, self._loss_fn, self._device = model, loss_fn, device
        self._snapshot: _Snapshot | None = None

    def key(self) -> Facts:
        """A value that is equal to an earlier one exactly when that one's programs may be used.

        In a steady state this compares object identities, of about a dozen objects a module, and builds nothing.
        """
        settings = _settings()
        if self._snapshot is None or not self._snapshot.holds(settings):
            self._snapshot = _take(self._model, self._loss_fn, self._device, settings)
        return self._snapshot.key

    @staticmethod
    def difference(old: Hashable, new: Hashable) -> list[str]:
        """Sentences that name what changed between two keys, old value and new."""
        if not (isinstance(old, Facts) and isinstance(new, Facts)):
            raise TypeError("expected two keys of a ModelGuard")
        return difference(old, new)


@dataclass
class _Snapshot:
    """A key, and the objects it was made from, laid out for a fast comparison by identity."""

    key: Facts = field(default_factory=lambda: Facts({}))
    settings: tuple[Any, ...] = ()
    rows: list[tuple[Callable[[Any], Any], Any]] = field(default_factory=list)
    objects: list[Any] = field(default_factory=list)
    tables: list[Any] = field(default_factory=list)
    length: int = 0
    empty: list[Any] = field(default_factory=list)
    readers: list[Callable[[], Any]] = field(default_factory=list)
    read: list[Any] = field(default_factory=list)
    modules: list[nn.Module] = field(default_factory=list)
    kinds: list[type[nn.Module]] = field(default_factory=list)
    classes: list[type[nn.Module]] = field(default_factory=list)
    forwards: list[Any] = field(default_factory=list)
    functions: list[Any] = field(default_factory=list)
    codes: list[Any] = field(default_factory=list)
    tensors: list[torch.Tensor] = field(default_factory=list)
    looks: list[list[Any]] = field(default_factory=list)
    same_forms: Callable[[], bool] = lambda: True

    def watch(self, table: Any) -> None:
        """Notice when a dict, or another container, holds other objects than now."""
        if not table:
            self.empty.append(table)
            return
        self.tables.append(table)
        self.length += len(table)
        self.rows.append((dict.values if isinstance(table, dict) else iter, table))
        self.objects += table.values() if isinstance(table, dict) else table

    def watch_attributes(self, module: nn.Module, names: list[str]) -> None:
        attributes = vars(module)
        self.tables.append(attributes)
        self.length += len(attributes)
        self.rows.append((itemgetter("training", "training", *names), attributes))
        self.objects += [module.training, module.training, *(attributes[name] for name in names)]

    def watch_entries(self, table: Any, entries: Mapping[Any, Any]) -> None:
        """Notice when some entries of a dict are replaced or gone; others do not matter."""
        first = next(iter(entries))
        self.rows.append((itemgetter(first, *entries), table))  # at least two, so that it yields a tuple
        self.objects += [entries[first], *entries.values()]

    def holds(self, settings: tuple[Any, ...]) -> bool:
        """Whether nothing has been replaced since. Compares no values, so it cannot touch a device."""
        try:
            return (
                settings == self.settings
                and not any(self.empty)
                and sum(map(len, self.tables)) == self.length
                and all(map(is_, chain.from_iterable([get(table) for get, table in self.rows]), self.objects))
                and all(map(is_, map(type, self.modules), self.kinds))
                and all(map(is_, [kind.forward for kind in self.classes], self.forwards))
                and all(map(is_, [_read(reader) for reader in self.readers], self.read))
                and all(map(is_, [function.__code__ for function in self.functions], self.codes))
                and self.same_forms()
                and self.look() == self.looks
            )
        except (KeyError, AttributeError, RuntimeError):
            return False

    def look(self) -> list[list[Any]]:
        """What can change in a parameter that stays the same object, besides its form.

        Its memory (`p.data = ...`) says nothing of a program, but may be another's from then on.
        """
        return [list(map(read, self.tensors)) for read in _LOOKS]


_LOOKS = (
    internals.hooks_of,
    internals.accumulate_hooks_of,
    torch.Tensor.data_ptr,
)


def _read(reader: Callable[[], Any]) -> Any:
    try:
        return reader()
    except (ValueError, LookupError):
        return _UNSET


_SETTINGS = (
    "default dtype",
    "deterministic algorithms",
    "autocast on cpu",
    "autocast on cuda",
    "flash attention",
    "memory efficient attention",
    "math attention",
)


def _settings() -> tuple[Any, ...]:
    """The values of `_SETTINGS`; an autocast is its dtype, or None where it is off."""
    kernels = torch.backends.cuda
    return (
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None,
        torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None,
        kernels.flash_sdp_enabled(),
        kernels.mem_efficient_sdp_enabled(),
        kernels.math_sdp_enabled(),
    )


def _take(
    model: nn.Module, loss_fn: Callable[..., Any] | None, device: torch.device | None, settings: tuple[Any, ...]
) -> _Snapshot:
    """Read all facts of a model, and set up the comparison that says whether they still hold."""
    found, watched, facts = _Snapshot(settings=settings), Watched(), dict[Subject, Hashable]()
    for name, value in zip(_SETTINGS, settings, strict=True):
        facts["setting", "", name] = "off" if value is None else value
    first_names: dict[int, str] = {}
    for name, module in model.named_modules():
        _take_module(found, watched, facts, name, module)
        for kind, table in (
            ("parameter", internals.own_parameters(module)),
            ("buffer", internals.own_buffers(module)),
        ):
            for short, tensor in table.items():
                if tensor is not None:
                    full = f"{name}.{short}".lstrip(".")
                    first = first_names.setdefault(id(tensor), full)
                    facts[kind, name, full] = _tensor_facts(tensor, None if first == full else first, device)
                    if first == full:
                        found.tensors.append(tensor)
                        _take_hooks(found, watched, facts, name, full, tensor)
    found.looks, found.same_forms = found.look(), form_check(found.tensors)
    found.classes = list(dict.fromkeys(found.kinds))
    found.forwards = [kind.forward for kind in found.classes]
    for number, every in enumerate(internals.global_hooks()):
        found.watch(every)
        if every:
            facts["hooks", "", f"global hooks {number}"] = tuple(freeze(h, watched) for h in every.values())
    _take_functions(found, watched, facts, model, loss_fn)
    for container in watched.containers:
        found.watch(container)
    found.key = Facts(facts)
    return found


def _take_module(
    found: _Snapshot, watched: Watched, facts: dict[Subject, Hashable], name: str, module: nn.Module
) -> None:
    kind = type(module)
    facts["module", "", name] = f"{kind.__module__}.{kind.__qualname__}"
    facts["mode", name, ""] = module.training
    skipped = {*internals.INTERNAL, "training"}
    names = [key for key in vars(module) if key not in skipped and not internals.is_derived(module, key)]
    for attribute in names:
        facts["attribute", name, attribute] = freeze(vars(module)[attribute], watched)
    for hooks in internals.HOOKS:
        registered = internals.hooks(module, hooks)
        if registered:
            facts["hooks", name, hooks] = tuple(freeze(hook, watched) for hook in registered)
    found.modules.append(module)
    found.kinds.append(kind)
    found.watch_attributes(module, names)
    for table in internals.tables(module):
        found.watch(table)


def _take_hooks(
    found: _Snapshot, watched: Watched, facts: dict[Subject, Hashable], owner: str, name: str, tensor: torch.Tensor
) -> None:
    hooks = internals.hooks_of(tensor)
    for table in (hooks, internals.accumulate_hooks_of(tensor)):
        if table is not None:  # empty, where hooks were removed: another one comes into the same table
            found.watch(table)
    if hooks:
        facts["hooks", owner, f"gradient hooks of '{name}'"] = tuple(freeze(hook, watched) for hook in hooks.values())


def _tensor_facts(tensor: torch.Tensor, same_as: str | None, device: torch.device | None) -> TensorFacts:
    placed = device if device is not None and tensor.device.type == "meta" else tensor.device
    return TensorFacts(
        tuple(tensor.shape),
        tensor.stride(),
        tensor.dtype,
        placed,
        tensor.requires_grad,
        same_as,
        internals.has_hooks(tensor),
        tensor_parallel.placed(tensor),
    )


def _take_functions(
    found: _Snapshot,
    watched: Watched,
    facts: dict[Subject, Hashable],
    model: nn.Module,
    loss_fn: Callable[..., Any] | None,
) -> None:
    seen: set[int] = set()
    tables: dict[int, tuple[Any, dict[Any, Any]]] = {}
    hooks = {id(plain_function(hook)) for hook, _ in hook_entries(model)}  # their code is a fact of the module's
    for function, name in entry_points(model, loss_fn):
        plain = plain_function(function)
        if plain is not None and id(plain) not in hooks:
            facts["function", "", name] = plain.__code__
            found.functions.append(plain)
            found.codes.append(plain.__code__)
        for variable in variables(function, name, seen):
            if variable.kind == WATCHED:
                continue
            value = _read(variable.read)
            table, key = held_in(variable)
            if table is not None and value is not _UNSET:
                tables.setdefault(id(table), (table, {}))[1][key] = value
            else:
                found.readers.append(variable.read)
                found.read.append(value)
            if value is not _UNSET:
                plain_value = freeze(value, watched, objects=variable.kind != "global")
                facts[variable.kind, variable.function, variable.name] = plain_value
    for table, entries in tables.values():
        found.watch_entries(table, entries)
    if loss_fn is not None and plain_function(loss_fn) is None:
        facts["attribute", "", "loss_fn"] = freeze(loss_fn, watched)


def read_captured(captured: Mapping[str, Captured], expected: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors that user code holds by itself, as they are now, by name.

    expected: the fake tensor that the program has for each. Raises GuardError where a tensor no longer fits: it is
    gone, has another shape, dtype or device, or requires a gradient. Another capture may then serve it.
    """
    found = {}
    for name, source in captured.items():
        tensor, want = _read(source.read), expected[name]
        if not isinstance(tensor, torch.Tensor):
            got = "nothing" if tensor is _UNSET else type(tensor).__name__
        elif tensor.requires_grad and not want.requires_grad:
            got = _form(tensor) + ", requires a gradient"
        elif (tensor.shape, tensor.dtype, tensor.device) != (want.shape, want.dtype, want.device):
            got = _form(tensor)
        else:
            found[name] = tensor
            continue
        raise GuardError(
            f"the tensor '{name}', which the program reads at each step, has changed its form",
            expected=_form(want),
            got=got,
            do="keep its shape, dtype and device, or pass it with the batch",
        )
    return found


def _form(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} tensor of shape {tuple(tensor.shape)} on {tensor.device}"
