"""The first values of parameters and buffers: the same for one seed, however many of them a rank holds.

The functions that initialise a model run module by module, children first, as `nn.Module.apply` has it. While they do,
only what is being initialised has memory; all else stands on meta, where writing and drawing cost nothing. And every
draw takes its numbers from (seed, module whose function draws, how many draws that function has made), never from a
stream that would depend on what was drawn before. So a function that reaches into other modules, as those of Hugging
Face models do, gives each tensor the same bits no matter which of the others are there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from graphcomp.compat.aliasing import memory_of, written_values
from graphcomp.compat.dispatch import BeforeCalls
from graphcomp.compat.modules import own_buffers, own_parameters
from graphcomp.errors import StateError
from graphcomp.ir.digest import number_of
from graphcomp.ir.randomness import mix

Initialiser = Callable[[nn.Module], object]
Keep = Callable[[str, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Recipe:
    """How to initialise a model. init: called with each module; None: each module's own `reset_parameters`."""

    init: Initialiser | None = None
    seed: int = 0


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


@dataclass(frozen=True)
class _Call:
    """A module whose function initialises something. It is run again for each module that it writes to."""

    path: str
    module: nn.Module
    function: Callable[[], object]


class Initial:
    """The first values of what a model has on meta. Making one tries all functions on meta and allocates nothing.

    needed: the names that must get values; None: all on meta. Raises StateError, naming it, for one of them that no
    function initialises, or that cannot be initialised by itself.
    """

    def __init__(
        self, model: nn.Module, recipe: Recipe, device: torch.device, needed: Collection[str] | None = None
    ) -> None:
        self.recipe, self.device = recipe, device
        self._slots = slots_of(model)
        self._stand_ins = {slot: _on_meta(slot.tensor) for slot in self._slots}
        self._further = _further_places(model, self._slots)
        self._by_memory: dict[int, Slot] = {}
        for slot, tensor in self._stand_ins.items():
            other = self._by_memory.setdefault(memory_of(tensor), slot)
            if other is not slot:
                raise StateError(
                    f"{slot.what} shares memory with '{other.name}' on the meta device",
                    expected="tensors with memory of their own, or one tensor under both names",
                    do="tie them (b.weight = a.weight), or register a clone",
                )
        self._writers: dict[Slot, list[_Call]] = {slot: [] for slot in self._slots}
        self._written: dict[Slot, dict[object, int]] = {slot: {} for slot in self._slots}
        self._order: dict[str, int] = {}
        missing = [slot for slot in self._slots if is_on_meta(slot.tensor)]
        if missing:
            with self._alone():
                for call in _calls(model, recipe.init):
                    self._try(call)
        missing = [s for s in missing if not self._is_written(s) and (needed is None or s.name in needed)]
        if missing:
            given = "init" if recipe.init is not None else "reset_parameters() of its module"
            part = f"a part only of {missing[0].what} is initialised"
            raise StateError(
                part if self._writers[missing[0]] else f"nothing initialises {missing[0].what}",
                where=f"module '{missing[0].module}'" if missing[0].module else "the model itself",
                expected=f"values from {given}",
                got=", ".join(f"'{slot.name}'" for slot in missing) + " left on meta",
                do="give its class reset_parameters(), or pass step.materialize(init=...) a function that initialises "
                "a module of this class (of a Hugging Face model: init=model._init_weights)",
            )

    def values(self, names: Collection[str], keep: Keep) -> dict[str, torch.Tensor]:
        """What is to be kept of each of these tensors.

        keep(name, whole) gets one after the other and returns it, or a part with memory of its own. The tensors of one
        module are whole at the same time, not those of several.
        """
        kept: dict[str, torch.Tensor] = {}
        with self._alone():
            for path in dict.fromkeys(slot.module for slot in self._slots if slot.name in names):
                own = [slot for slot in self._slots if slot.module == path]
                made = {slot: self._allocated(slot) for slot in own}
                for slot in own:
                    slot.table[slot.key] = made[slot]
                writers = {call.path: call for slot in own for call in self._writers[slot]}
                for place in sorted(writers, key=self._order.__getitem__):
                    self._run(writers[place], lambda *_: None)
                for slot in own:
                    whole, own_memory = slot.table[slot.key], made.pop(slot)
                    slot.table[slot.key] = self._stand_ins[slot]
                    if slot.name in names:
                        checked = self._checked(slot, whole)
                        kept[slot.name] = keep(slot.name, checked if whole is own_memory else checked.clone())
                        del checked
                    del whole, own_memory
        return kept

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """The model on meta, within, and generators of which nobody notices that they were used."""
        names = [self.device] if self.device.type != "cpu" else []
        places = [(slot.table, slot.key) for slot in self._slots] + [(table, key) for table, key, _ in self._further]
        before = [(table, key, table[key]) for table, key in places]
        try:
            with torch.random.fork_rng(names, device_type=self.device.type if names else "cuda"), torch.no_grad():
                for slot, tensor in self._stand_ins.items():
                    slot.table[slot.key] = tensor
                for table, key, tensor in self._further:  # a tied tensor is initialised at its first place only
                    table[key] = _on_meta(tensor, anew=True)
                yield
        finally:
            for table, key, tensor in before:
                table[key] = tensor

    def _try(self, call: _Call) -> None:
        """Note what a function writes to."""
        found: dict[Slot, None] = {}
        self._order[call.path] = len(self._order)

        def look(operator: Any, args: Any, kwargs: Any) -> None:
            for tensor in written_values(operator, args, kwargs):
                slot = self._by_memory.get(memory_of(tensor)) if is_on_meta(tensor) else None
                if slot is not None:
                    found[slot] = None
                    self._written[slot][tensor.storage_offset(), tensor.shape] = tensor.numel()

        self._run(call, look)
        for slot, tensor in self._stand_ins.items():
            if slot.owner is call.module and slot.table.get(slot.key) is not tensor:  # another one in its place
                found[slot] = None
                self._written[slot]["the whole"] = tensor.numel()
                slot.table[slot.key] = tensor
        for slot in found:
            self._writers[slot].append(call)

    def _is_written(self, slot: Slot) -> bool:
        """Whether all of a tensor is, as far as the sizes of what was written at different places tell."""
        return bool(self._writers[slot]) and sum(self._written[slot].values()) >= slot.tensor.numel()

    def _run(self, call: _Call, look: Callable[[Any, Any, Any], None]) -> None:
        """Call a function; its draws depend on nothing but the seed, its module and their number."""
        draws = 0

        def before(operator: Any, args: Any, kwargs: Any) -> None:
            nonlocal draws
            look(operator, args, kwargs)
            if torch.Tag.nondeterministic_seeded in operator.tags:
                if kwargs.get("generator") is not None:
                    raise StateError(
                        "an initialisation draws from a generator of its own",
                        where=f"module '{call.path}', {type(call.module).__name__}",
                        expected="draws from torch's default generator, which depend on materialize(seed=...) alone",
                        do="leave out generator=",
                    )
                self._seed(mix(self.recipe.seed, number_of(call.path), draws) >> 1)
                draws += 1

        try:
            with torch.device(self.device), BeforeCalls(before):
                call.function()
        except Exception as error:
            error.add_note(f"while initialising module '{call.path}', {type(call.module).__name__}")
            raise

    def _seed(self, number: int) -> None:
        torch.default_generator.manual_seed(number)
        if self.device.type != "cpu":
            torch.get_device_module(self.device).manual_seed(number)

    def _allocated(self, slot: Slot) -> torch.Tensor:
        like = slot.tensor
        made = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=self.device).zero_()
        return nn.Parameter(made, like.requires_grad) if isinstance(like, nn.Parameter) else made

    def _checked(self, slot: Slot, found: Any) -> torch.Tensor:
        """Another tensor may have been put in the place; it must be of the same form."""
        like = slot.tensor
        fits = isinstance(found, torch.Tensor) and (found.shape, found.dtype) == (like.shape, like.dtype)
        if not fits or is_on_meta(found):
            raise StateError(
                f"{slot.what} was replaced by something else while it was initialised",
                expected=f"a {like.dtype} tensor of shape {tuple(like.shape)}",
                got=f"{found.dtype} of shape {tuple(found.shape)} on {found.device}"
                if isinstance(found, torch.Tensor)
                else type(found).__name__,
                do="write into it: self.buffer.copy_(...)",
            )
        return found.detach().to(self.device)


def _further_places(model: nn.Module, slots: list[Slot]) -> list[tuple[dict[str, Any], str, torch.Tensor]]:
    """Where tied tensors stand besides: tables with a key and what it holds."""
    first = {(id(slot.table), slot.key) for slot in slots}
    tables = [table for module in model.modules() for table in (own_parameters(module), own_buffers(module))]
    return [(t, k, one) for t in tables for k, one in t.items() if one is not None and (id(t), k) not in first]


def _on_meta(tensor: torch.Tensor, anew: bool = False) -> torch.Tensor:
    """The tensor itself if it is on meta; otherwise, or if it is to be another, one of its form that is."""
    if is_on_meta(tensor) and not anew:
        return tensor
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made


def _calls(model: nn.Module, init: Initialiser | None) -> Iterator[_Call]:
    for path, module in _children_first(model, "", set()):
        if init is not None:
            yield _Call(path, module, _bound(init, module))
        else:
            own: Mapping[str, Any] = {
                key: getattr(module, key, None) for key in ("reset_parameters", "_reset_parameters")
            }
            function = next((one for one in own.values() if callable(one)), None)
            if function is not None:
                yield _Call(path, module, function)


def _bound(init: Initialiser, module: nn.Module) -> Callable[[], object]:
    return lambda: init(module)


def _children_first(module: nn.Module, path: str, seen: set[int]) -> Iterator[tuple[str, nn.Module]]:
    if id(module) in seen:
        return
    seen.add(id(module))
    for name, child in module.named_children():
        yield from _children_first(child, f"{path}.{name}".lstrip("."), seen)
    yield path, module
