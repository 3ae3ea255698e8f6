"""Weights by original name into a model, whatever part of it this rank holds."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from os import PathLike
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from graphcomp.checkpoint.entries import Entries, Entry, entries, is_extra_state, set_extra_state
from graphcomp.checkpoint.files import Source, open_weights
from graphcomp.compat.blocks import Block, Placed, block_of, placed_as
from graphcomp.compat.sharded import local_rows
from graphcomp.errors import CheckpointError
from graphcomp.runtime.state.initial import Initialiser
from graphcomp.runtime.state.slots import is_on_meta

if TYPE_CHECKING:
    from graphcomp.step import CompiledStep


class Differences(NamedTuple):
    """Names that the model has and the source does not, and the other way round."""

    missing: list[str]
    unexpected: list[str]


@dataclass(frozen=True)
class Match:
    """What this rank reads, each with its name in the source."""

    read: tuple[tuple[Entry, str], ...]
    differences: Differences


def load_weights(
    step: CompiledStep,
    path: str | PathLike[str],
    *,
    init: Initialiser | None = None,
    strict: bool = True,
    rename: Callable[[str], str] | None = None,
) -> Differences:
    """Load this rank's part of the weights in a file or folder, by the model's own names. All ranks must call it.

    path: a `.safetensors` file, a file of `torch.save`, an index (`*.index.json`), or a folder with one of these; the
        same weights on every rank. Only what this rank owns is read.
    init: as `step.materialize` takes it, for what no file holds of a model on meta: buffers that are not persistent
        and, without `strict`, what is missing.
    strict: raise where a name is missing or unexpected. Of a tied tensor one name is enough; of several, the last.
    rename: gives for each name in the file the model's name.

    A model on meta is materialised: each rank gets memory for what it owns. With several stages, compile an example
    first. Returns the names that are missing and unexpected. Raises CheckpointError before any effect, on all ranks.
    """
    with open_weights(path, rename) as source:
        return fill(step, lambda: source.opened(), init, strict, every=True)


def load_state_dict(step: CompiledStep, state: Mapping[str, Any], strict: bool) -> Differences:
    """From a dict: of whole tensors, or of those that this rank has in its own `state_dict()`."""

    def read(key: str, block: Block | None) -> torch.Tensor:
        value = state[key]
        if isinstance(value, DTensor):
            return local_rows(value)
        return value.detach() if block is None else value.detach()[block]

    tensors = {key: value for key, value in state.items() if not is_extra_state(key)}
    extra_state = {key: value for key, value in state.items() if is_extra_state(key)}
    wrong = [key for key, value in tensors.items() if not isinstance(value, torch.Tensor)]

    def look() -> Source:
        if wrong:
            raise CheckpointError(f"'{wrong[0]}' of the state dict is no tensor", got=type(state[wrong[0]]).__name__)
        holding = step.engine.owned.holding
        for one in entries(step).owned:
            placed = (holding.placed if is_on_meta(one.tensor) else placed_as)(one.tensor)
            for key in one.keys:
                _check_placement(key, state.get(key), placed)
        return Source({key: tuple(value.shape) for key, value in tensors.items()}, read, extra_state)

    return fill(step, look, None, strict, every=False)


def fill(
    step: CompiledStep, look: Callable[[], Source], init: Initialiser | None, strict: bool, *, every: bool
) -> Differences:
    """Read what this rank owns from a source. every: the source has to have what other ranks own, too."""

    def prepare() -> tuple[Source, Match, Callable[[], None]]:
        source = look()
        found = match(entries(step), source.shapes, source.extra_state, strict, every)
        return source, found, step.engine.owned.memory([one.name for one, _ in found.read], init)

    source, found, give_memory = step.engine.together.look("load weights", prepare, refusal=CheckpointError)

    def work() -> None:
        give_memory()
        with torch.no_grad():
            for one, key in _placed(step, found.read):
                local_rows(one.tensor).copy_(source.read(key, block_of(one.tensor)))
        known = entries(step).extra_state
        set_extra_state(step.model, {key: value for key, value in source.extra_state.items() if key in known})
        step.engine.state.refresh()

    step.together("loading weights", work)
    return found.differences


def _placed(step: CompiledStep, read: Iterable[tuple[Entry, str]]) -> list[tuple[Entry, str]]:
    """The same with the tensors as they are now: a buffer that had no memory was replaced."""
    now = {one.name: one for one in entries(step).tensors}
    return [(now[one.name], key) for one, key in read]


def match(
    held: Entries, shapes: Mapping[str, tuple[int, ...]], extra_state: Collection[str], strict: bool, every: bool
) -> Match:
    """Raises CheckpointError, with all of their names, for what does not fit."""
    read: list[tuple[Entry, str]] = []
    missing: list[str] = []
    wrong: list[str] = []
    for one in held.tensors:
        present = [key for key in one.keys if key in shapes]
        if not (every or one.owned):
            continue
        if not present:
            missing += one.keys[:1]
            continue
        shape = tuple(one.tensor.shape)
        wrong += [f"'{key}' {shapes[key]} in the place of {shape}" for key in present if shapes[key] != shape]
        if one.owned:
            read.append((one, present[-1]))
    missing += sorted(set(held.extra_state).difference(extra_state))
    unexpected = sorted(set(shapes) - held.keys) + sorted(set(extra_state).difference(held.extra_state))
    if wrong:
        raise CheckpointError(
            f"{_number(wrong, 'tensor')} of other shapes than the model's", got=_some(wrong), do="build the model alike"
        )
    if strict and (missing or unexpected):
        parts = [(missing, "missing"), (unexpected, "not the model's")]
        raise CheckpointError(
            "the names do not fit the model: " + "; ".join(_are(x, y) for x, y in parts if x),
            expected=_some(missing) + " as well" if missing else "names of the model only",
            got=_some(unexpected) + " besides" if unexpected else None,
            do="rename=..., if the file has other names; strict=False to load what fits",
        )
    return Match(tuple(read), Differences(missing, unexpected))


def _check_placement(key: str, value: object, placed: Placed | None) -> None:
    """A DTensor is taken if it is laid out as the model's is; a whole tensor always."""
    if isinstance(value, DTensor) and placed_as(value) != placed:
        raise CheckpointError(
            f"'{key}' of the state dict is laid out otherwise than the model's",
            expected="a whole tensor"
            if placed is None
            else f"a whole tensor, or a DTensor {placed.placements} over {placed.mesh}",
            got=f"a DTensor {value.placements} over {value.device_mesh}",
            do="pass full_tensor(), or save and load with graphcomp.checkpoint, which redistributes",
        )


def _are(names: Collection[str], what: str) -> str:
    return f"{_number(names, 'name')} {'is' if len(names) == 1 else 'are'} {what}"


def _number(names: Collection[str], what: str) -> str:
    return f"{len(names)} {what}{'s' * (len(names) != 1)}"


def _some(names: list[str], most: int = 12) -> str:
    shown = [name if name.startswith("'") else f"'{name}'" for name in names[:most]]
    return ", ".join(shown) + (f" and {len(names) - most} more" if len(names) > most else "")
