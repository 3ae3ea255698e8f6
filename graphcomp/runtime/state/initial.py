"""The first values of parameters and buffers: the same for one seed, however many of them a rank holds.

The functions that initialise a model run module by module, children first, as `nn.Module.apply` has it. While they do,
only what is being initialised has memory; all else stands on meta, where writing and drawing cost nothing. And every
draw takes its numbers from (seed, module whose function draws, tensor, how many draws there were for it), never from a
stream that would depend on what was drawn before. So a function that reaches into other modules, as those of Hugging
Face models do, gives each tensor the same bits no matter which of the others are there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from graphcomp.compat.aliasing import memory_of, written_values
from graphcomp.compat.dispatch import BeforeCalls
from graphcomp.compat.function_modes import FunctionMode
from graphcomp.errors import StateError
from graphcomp.ir.digest import number_of
from graphcomp.ir.randomness import mix
from graphcomp.runtime.state.slots import Slot, further_places, is_on_meta, slots_of, stand_in

Initialiser = Callable[[nn.Module], object]
Keep = Callable[[str, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Recipe:
    """How to initialise a model. init: called with each module; None: each module's own `reset_parameters`."""

    init: Initialiser | None = None
    seed: int = 0


@dataclass(frozen=True)
class _Call:
    """A module whose function initialises something. It is run again for each module that it writes to."""

    path: str
    module: nn.Module
    function: Callable[[], object]


@dataclass
class _Run:
    """What a call does. at: the tensor that it was last seen at. draws: how many, at each. asked: whether on meta.

    written: of each tensor, the size of each part that was written to. draws_apart: into something else.
    """

    at: Slot | None = None
    draws: dict[str, int] = field(default_factory=dict)
    written: dict[Slot, dict[object, int]] = field(default_factory=dict)
    asked: dict[Slot, None] = field(default_factory=dict)
    draws_apart: bool = False


class _Asked(FunctionMode):
    """Within, `observer(tensor)` is called when code asks whether a tensor is on meta."""

    def __init__(self, observer: Callable[[torch.Tensor], None]) -> None:
        super().__init__()
        self.observer = observer

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func == _IS_META:
            self.observer(args[0])
        return func(*args, **kwargs)


_IS_META = torch.Tensor.is_meta.__get__  # type: ignore[attr-defined]


def _uninitialised(missing: list[Slot], recipe: Recipe, part: bool = False) -> StateError:
    given = "init" if recipe.init is not None else "reset_parameters() of its module"
    what = missing[0].what
    return StateError(
        f"a part only of {what} is initialised" if part else f"nothing initialises {what}",
        where=f"module '{missing[0].module}'" if missing[0].module else "the model itself",
        expected=f"values from {given}",
        got=", ".join(f"'{slot.name}'" for slot in missing) + " left on meta",
        do="give its class reset_parameters(), or pass step.materialize(init=...) a function that initialises "
        "a module of this class (of a Hugging Face model: init=model._init_weights)",
    )


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
        self._stand_ins = {slot: stand_in(slot.tensor) for slot in self._slots}
        self._further = further_places(model, self._slots)
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
            raise _uninitialised(missing, recipe, part=bool(self._writers[missing[0]]))

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
                memory = {memory_of(tensor): slot for slot, tensor in made.items()}
                self._by_memory |= memory
                writers = {call.path: call for slot in own for call in self._writers[slot]}
                written: set[Slot] = set()
                for place in sorted(writers, key=self._order.__getitem__):
                    written.update(self._run(writers[place]).written)
                for number in memory:
                    del self._by_memory[number]
                for slot in own:
                    whole, own_memory = slot.table[slot.key], made.pop(slot)
                    slot.table[slot.key] = self._stand_ins[slot]
                    if slot.name in names:
                        if whole is own_memory and slot not in written and slot.tensor.numel():
                            raise _uninitialised([slot], self.recipe)
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
                    table[key] = stand_in(tensor, anew=True)
                yield
        finally:
            for table, key, tensor in before:
                table[key] = tensor

    def _try(self, call: _Call) -> None:
        """Note what a function writes to."""
        run = self._run(call)
        for slot, tensor in self._stand_ins.items():
            if slot.owner is call.module and slot.table.get(slot.key) is not tensor:  # another one in its place
                run.written.setdefault(slot, {})["the whole"] = tensor.numel()
                slot.table[slot.key] = tensor
        for slot in run.asked:  # torch's own functions do nothing, then; whether they write is seen when they run
            run.written.setdefault(slot, {})["asked"] = slot.tensor.numel()
        if run.asked and run.draws_apart and any(slot.owner is not call.module for slot in run.written):
            raise StateError(
                "an initialisation draws numbers apart from the tensors that it initialises, of several modules",
                where=f"module '{call.path}', {type(call.module).__name__}",
                do="draw into the parameters (weight.normal_()), or initialise each module by itself",
            )
        self._order[call.path] = len(self._order)
        for slot, parts in run.written.items():
            self._writers[slot].append(call)
            self._written[slot] |= parts

    def _is_written(self, slot: Slot) -> bool:
        """Whether all of a tensor is, as far as the sizes of what was written at different places tell."""
        return bool(self._writers[slot]) and sum(self._written[slot].values()) >= slot.tensor.numel()

    def _slot(self, tensor: Any) -> Slot | None:
        return self._by_memory.get(memory_of(tensor)) if type(tensor) in (torch.Tensor, nn.Parameter) else None

    def _run(self, call: _Call) -> _Run:
        """Call a function. Its draws depend on the seed, its module, the tensor it is at, and their number there."""
        run = _Run()

        def before(operator: Any, args: Any, kwargs: Any) -> None:
            for given in args:
                for one in given if isinstance(given, list | tuple) else (given,):
                    run.at = self._slot(one) or run.at
            draws = torch.Tag.nondeterministic_seeded in operator.tags
            written = [(self._slot(tensor), tensor) for tensor in written_values(operator, args, kwargs)]
            for slot, tensor in written:
                if slot is not None:
                    run.at = slot
                    run.written.setdefault(slot, {})[tensor.storage_offset(), tensor.shape] = tensor.numel()
            if not draws:
                return
            if kwargs.get("generator") is not None:
                raise StateError(
                    "an initialisation draws from a generator of its own",
                    where=f"module '{call.path}', {type(call.module).__name__}",
                    expected="draws from torch's default generator, which depend on materialize(seed=...) alone",
                    do="leave out generator=",
                )
            run.draws_apart |= not any(slot for slot, _ in written)
            place = run.at.name if run.at is not None else ""
            number = run.draws[place] = run.draws.get(place, -1) + 1
            self._seed(mix(self.recipe.seed, number_of(call.path), number_of(place), number) >> 1)

        def asked(tensor: torch.Tensor) -> None:
            slot = self._slot(tensor)
            if slot is not None:
                run.at, run.asked[slot] = slot, None

        try:
            with torch.device(self.device), _Asked(asked), BeforeCalls(before):
                call.function()
        except Exception as error:
            error.add_note(f"while initialising module '{call.path}', {type(call.module).__name__}")
            raise
        return run

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
