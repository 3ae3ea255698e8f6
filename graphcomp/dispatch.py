"""Dispatch: which specialisation a microbatch uses. Decided on the host, before anything has an effect."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from graphcomp.capture.batch import batch_key, dense, describe
from graphcomp.capture.facts import Facts
from graphcomp.capture.guards import ModelGuard
from graphcomp.compiler import GraphCompiler, Specialisation
from graphcomp.errors import BatchError, GuardError
from graphcomp.runtime.program.inputs import MicrobatchInputs
from graphcomp.stored import Kind, Store


@dataclass(frozen=True)
class Bound(MicrobatchInputs):
    """A microbatch with the specialisation that serves it."""

    specialisation: Specialisation


@dataclass
class _Entry:
    """All specialisations of one kind of batch in one state of the model. places: (position, path) of its tensors."""

    places: tuple[tuple[int, str], ...]
    specialisations: list[Specialisation] = field(default_factory=list)


@dataclass
class _Named:
    """Batches whose fields have these names, in one state of the model. read: the fields that some program reads; None:
    all. entries: by what selects a program besides.
    """

    fields: Hashable
    read: frozenset[str] | None = None
    entries: dict[Hashable, _Entry] = field(default_factory=dict)

    def reduced(self, batch: Any) -> Any:
        """The batch without the fields that nobody reads."""
        if self.read is None or self.read.issuperset(batch):
            return batch
        return {name: value for name, value in batch.items() if name in self.read}


_Context = tuple[Facts, bool]
"""The model's state, and whether a step trains."""


class Dispatcher:
    """Finds, or captures, the specialisation of each microbatch."""

    def __init__(self, compiler: GraphCompiler, device: torch.device) -> None:
        self.compiler, self.device = compiler, device
        self.guard = ModelGuard(compiler.model, compiler.loss_fn, device)
        self._known: dict[_Context, dict[Hashable, _Named]] = {}
        self._last: tuple[Facts, str] | None = None
        self.state = Facts({})
        self.store: Store | None = None

    def select(self, microbatches: Sequence[Any], training: bool) -> list[Bound]:
        """One bound microbatch each, in order. Captures what was not seen before.

        Raises GuardError, naming what changed, if that would exceed the plan's `max_programs`.
        """
        state, buckets = self.guard.key(), self.compiler.plan.buckets
        self.state, bound = state, []
        if buckets is not None and not self.compiler.specialisations:
            buckets.check_names(microbatches)
        context = (state, training)
        known = self._known.setdefault(context, {})
        for number, batch in enumerate(microbatches):
            try:
                given = batch if buckets is None else buckets.padded(batch)
                fields = _fields(given)
                bound.append(self._bind(given, context, known.get(fields) or self._named(context, fields)))
            except BaseException as error:
                error.add_note(f"in microbatch {number}")
                raise
        return bound

    def programs(self) -> Iterator[tuple[Kind, Specialisation]]:
        """All specialisations that may be used again, with what they serve."""
        for context, known in self._known.items():
            for named in known.values():
                for batch, entry in named.entries.items():
                    for one in entry.specialisations:
                        yield Kind(*context, named.fields, batch, named.read), one

    def forget(self, number: int) -> None:
        """Drop the specialisations from `number` on, as if they had never been captured."""
        del self.compiler.specialisations[number:]
        for context, known in list(self._known.items()):
            for fields, named in list(known.items()):
                for key, entry in list(named.entries.items()):
                    entry.specialisations = [one for one in entry.specialisations if one.number < number]
                    if not entry.specialisations:
                        del named.entries[key]
                if not named.entries:
                    del known[fields]
            if not known:
                del self._known[context]

    def _named(self, context: _Context, fields: Hashable) -> _Named:
        read = None if self.store is None else self.store.read(*context, fields)
        return self._known[context].setdefault(fields, _Named(fields, read))

    def _bind(self, batch: Any, context: _Context, named: _Named) -> Bound:
        reduced = named.reduced(batch)
        key, leaves = batch_key(reduced)
        entry = named.entries.get(key)
        found = None if entry is None else _serve(entry, leaves)
        if found is not None:
            return found
        state, training = context
        if self.store is not None:
            places = _places(reduced)
            stored = self.store.take(*context, named.fields, key, _tensors(places, leaves))
            if stored is not None:
                entry = named.entries.setdefault(key, _Entry(places))
                entry.specialisations.append(stored)
                stored.state, self._last = state, (state, _sketch(batch))
                found = _serve(entry, leaves)
                if found is not None:
                    return found
        self._check_room(batch, state, entry, leaves)
        joint = self.compiler.capture(batch, training=training, device=self.device)
        self._last = (state, _sketch(batch))
        if joint.read is not None:
            # Programs captured before keep the key of what had been read until then; they are found no more
            # if this grows, and captured once again: never is a field overlooked that some capture reads.
            named.read = (named.read or frozenset()) | joint.read
        reduced = named.reduced(batch)
        key, leaves = batch_key(reduced)
        entry = named.entries.setdefault(key, _Entry(_places(reduced)))
        captured = self.compiler.specialisations[-1]
        captured.kind, captured.state = f"training={training}, {key}, {joint.sizes.conditions}", state
        entry.specialisations.append(captured)
        found = _serve(entry, leaves)
        if found is None:
            sizes = entry.specialisations[-1].joint.sizes
            tensors = {path: leaves[i] for i, path in entry.places}
            raise BatchError(
                "a microbatch does not fit the program that was captured from it",
                got="; ".join(sizes.differences(sizes.bind(tensors), tensors)),
            )
        return found

    def _check_room(self, batch: Any, state: Facts, entry: _Entry | None, leaves: Sequence[Any]) -> None:
        limit = self.compiler.plan.max_programs
        if len(self.compiler.specialisations) < limit or self._last is None:
            return
        before, sketch = self._last
        changed = self.guard.difference(before, state) or [f"the batch was {sketch} and is {_sketch(batch)}"]
        remedy = "keep it fixed, pass it as a tensor"
        differences = [] if entry is None else _sizes_that_differ(entry, leaves)
        if differences:
            changed += differences
            remedy = (
                "where one size must be, or not be, a number or another size: bring it to one size by padding, or read "
                "table[torch.arange(n)] for table[:n], which is all of the table for one n; else let no code make a "
                "plain number of a size: int(n), float(n), math.sqrt(n), len(x), range(n), f'{n}'"
            )
        seconds = self.compiler.specialisations[-1].joint.seconds
        raise GuardError(
            f"another specialisation is needed, but {limit} were made already",
            where="; ".join(changed),
            expected="inputs and model state that one of the compiled programs serves",
            do=f"{remedy}, or raise Plan(max_programs=...); a capture took {seconds:.1f} s",
        )


def _fields(batch: Any) -> Hashable:
    return tuple(batch) if isinstance(batch, Mapping) else None


def _places(batch: Any) -> tuple[tuple[int, str], ...]:
    spec, tensors = describe(batch)
    return tuple((i, path) for i, path in enumerate(spec.paths) if path in tensors)


def _serve(entry: _Entry, leaves: Sequence[Any]) -> Bound | None:
    tensors = _tensors(entry.places, leaves)
    for one in entry.specialisations:
        sizes = one.joint.sizes.fit(tensors)
        if sizes is not None and _captured_fit(one):
            return Bound(tensors, one.joint.with_contents(sizes, tensors), one)
    return None


def _tensors(places: Sequence[tuple[int, str]], leaves: Sequence[Any]) -> dict[str, torch.Tensor]:
    """By path. Programs are captured from, and compiled for, dense batch tensors."""
    return {path: dense(leaves[position]) for position, path in places}


def _sizes_that_differ(entry: _Entry, leaves: Sequence[Any]) -> list[str]:
    """Why the latest program of a kind does not serve these sizes."""
    tensors = {path: leaves[position] for position, path in entry.places}
    sizes = entry.specialisations[-1].joint.sizes
    return sizes.differences(sizes.bind(tensors), tensors)


def _captured_fit(one: Specialisation) -> bool:
    """Whether the tensors that user code reaches by itself still have the form they had at capture."""
    try:
        one.read_captured()
    except GuardError:
        return False
    return True


def _sketch(batch: Any) -> str:
    spec, tensors = describe(batch)
    parts = [f"{path}: {str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for path, t in tensors.items()]
    parts += [f"{spec.paths[i]}: {value!r}" for i, value in spec.static.items()]
    return "{" + ", ".join(parts) + "}"


def as_microbatches(microbatches: Iterable[Any]) -> list[Any]:
    """The microbatches as a list. Raises BatchError for a single batch, or none, in their place."""
    wrong = isinstance(microbatches, (Mapping, torch.Tensor, tuple, str)) or not isinstance(microbatches, Iterable)
    if wrong:
        raise BatchError(
            "a step takes a list of microbatches, not one batch",
            got=type(microbatches).__name__,
            do="put the batch into a list: step([batch])",
        )
    found = list(microbatches)
    if not found:
        raise BatchError("a step was given no microbatch", expected="a list of at least one", got="[]")
    return found
