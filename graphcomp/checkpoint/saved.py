"""Checkpoints to go on from: model, optimizer, random streams, and the number of steps, at every layout.

A folder as `torch.distributed.checkpoint` writes it, under the names `model.<name>` and
`optimizer.state.<name>.<key>`, and beside it one file with all that is no tensor. A tensor that several ranks hold
is written once; a sharded one in parts, and read in others if the layout is another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.optim import Optimizer

from graphcomp.checkpoint.entries import entries, set_extra_state
from graphcomp.checkpoint.optimizers import groups_to_load, load_optimizer, optimizer_state, tensors_to_load
from graphcomp.checkpoint.weights import match
from graphcomp.checkpoint.writing import PLAIN, Contents, World, alone, as_bytes, begin, find, from_bytes, write
from graphcomp.errors import CheckpointError, error_text
from graphcomp.runtime.state.initial import Initialiser

if TYPE_CHECKING:
    from graphcomp.step import CompiledStep


FORMAT = 1
MODEL, OPTIMIZER = "model.", "optimizer.state."


def save(
    step: CompiledStep, folder: str | PathLike[str], optimizer: Optimizer | None = None, extra: Any = None
) -> None:
    """Write all that a run needs to go on. All ranks must call it, with the same folder, which all of them see.

    optimizer: its state goes with the names of the parameters. extra: anything of tensors, numbers, texts, lists and
        dicts, such as `scheduler.state_dict()`; that of the first rank is kept.

    Whole or not at all: it is written beside `folder` and put in its place at the end. If a rank fails, all raise
    CheckpointError, and what was there before is as it was. Waits for what `save_async` has begun.
    """
    contents = step.engine.together.look(
        "save a checkpoint", lambda: _contents(step, optimizer, extra), f"folder={str(folder)!r}", CheckpointError
    )
    write(step, Path(folder), contents)


def save_async(
    step: CompiledStep, folder: str | PathLike[str], optimizer: Optimizer | None = None, extra: Any = None
) -> Future[None]:
    """As `save`, but writes in the background: what it saves is what there is now, whatever is trained meanwhile.

    Takes memory on the host for a copy of what this rank owns. `result()` of what it returns waits until the checkpoint
    is in its place, and raises what `save` raises. Saves of one step are written one after the other.
    """
    contents = step.engine.together.look(
        "save a checkpoint",
        lambda: _contents(step, optimizer, extra).copied(),
        f"folder={str(folder)!r}",
        CheckpointError,
    )
    return begin(step, Path(folder), contents)


def load(
    step: CompiledStep,
    folder: str | PathLike[str],
    optimizer: Optimizer | None = None,
    *,
    init: Initialiser | None = None,
) -> Any:
    """Go on from a checkpoint, saved at any layout. All ranks must call it. Returns what `save` was given as `extra`.

    Sets parameters, buffers, the optimizer's state and the options of its groups, the random streams, and
    `step.stats.steps`. init: as `step.materialize` takes it, for buffers of a model on meta that are not persistent.
    With several stages, compile an example first.

    Raises CheckpointError, on all ranks and before any effect, if names, shapes or the optimizer do not fit.
    """
    found = step.engine.together.look(
        "load a checkpoint",
        lambda: _look(step, Path(folder), optimizer, init),
        f"folder={str(folder)!r}",
        CheckpointError,
    )
    return step.together("loading a checkpoint", lambda: found.load(step, optimizer))


def _contents(step: CompiledStep, optimizer: Optimizer | None, extra: Any) -> Contents:
    held = entries(step)
    step.engine.state.require_real([one.name for one in held.owned])
    tensors = {MODEL + one.keys[0]: one.tensor.detach() for one in held.owned if one.keys}
    plain: dict[str, Any] = {
        "format": FORMAT,
        "steps": step.stats.steps,
        "random": _random_state(step.layout.device),
        "extra_state": dict(held.extra_state),
        "extra": extra if World(step.layout.side).place == 0 else None,
        "optimizer": None,
    }
    if optimizer is not None:
        state = optimizer_state(step.model, optimizer, step.owner())
        tensors |= {
            f"{OPTIMIZER}{name}.{key}": value for name, own in state.tensors.items() for key, value in own.items()
        }
        plain["optimizer"] = state.plain()
    return Contents(tensors, as_bytes(plain))


@dataclass(frozen=True)
class _Found:
    """A checkpoint that fits. groups: options for those of the optimizer."""

    folder: Path
    plain: Mapping[str, Any]
    names: Mapping[str, str]
    shapes: Mapping[str, TensorStorageMetadata]
    groups: list[dict[str, Any]]
    give_memory: Callable[[], None]

    def load(self, step: CompiledStep, optimizer: Optimizer | None) -> Any:
        self.give_memory()
        now = {one.name: one.tensor.detach() for one in entries(step).owned}
        wanted = {key: now[name] for name, key in self.names.items()}
        saved = self.plain["optimizer"]
        held: dict[str, dict[str, torch.Tensor]] = {}
        if optimizer is not None:
            held = tensors_to_load(step.model, optimizer, step.owner(), saved, self._form)
            wanted |= {f"{OPTIMIZER}{name}.{key}": t for name, own in held.items() for key, t in own.items()}
        self._read(wanted)
        if optimizer is not None:
            load_optimizer(step.model, optimizer, self.groups, held, saved["numbers"])
        set_extra_state(step.model, self.plain["extra_state"])
        _set_random_state(self.plain["random"], step)
        step.stats.steps = self.plain["steps"]
        step.engine.state.refresh()
        return self.plain["extra"]

    def _read(self, wanted: dict[str, Any]) -> None:
        """Into these tensors; every rank reads for itself what it needs."""
        try:
            alone()
            with torch.no_grad():
                dcp.load(wanted, storage_reader=dcp.FileSystemReader(self.folder), no_dist=True)
        except dcp.CheckpointException as failed:
            error, _ = next(iter(failed.failures.values()))
            raise CheckpointError(
                "the checkpoint cannot be read", where=str(self.folder), got=error_text(error)
            ) from error

    def _form(self, name: str, key: str) -> tuple[torch.Size, torch.dtype]:
        found = self.shapes[f"{OPTIMIZER}{name}.{key}"]
        return found.size, found.properties.dtype


def _look(step: CompiledStep, given: Path, optimizer: Optimizer | None, init: Initialiser | None) -> _Found:
    folder = find(given)
    plain = from_bytes((folder / PLAIN).read_bytes())
    if plain["format"] != FORMAT:
        raise CheckpointError(
            "the checkpoint is of another format", where=str(folder), expected=FORMAT, got=plain["format"]
        )
    metadata: Metadata = dcp.FileSystemReader(folder).read_metadata()
    tensors = {k: v for k, v in metadata.state_dict_metadata.items() if isinstance(v, TensorStorageMetadata)}
    shapes = {k.removeprefix(MODEL): tuple(v.size) for k, v in tensors.items() if k.startswith(MODEL)}
    held = entries(step)
    read = match(held, shapes, plain["extra_state"], strict=True, every=True).read
    groups: list[dict[str, Any]] = []
    if optimizer is not None:
        if plain["optimizer"] is None:
            raise CheckpointError(
                "the checkpoint holds no optimizer", where=str(folder), do="leave it out: load(step, folder)"
            )
        groups = groups_to_load(step.model, optimizer, plain["optimizer"])
    names = {one.name: MODEL + key for one, key in read}
    return _Found(folder, plain, names, tensors, groups, step.engine.owned.memory(list(names), init))


def _random_state(device: torch.device) -> dict[str, Any]:
    found = {"cpu": torch.get_rng_state()}
    if device.type != "cpu":
        found[device.type] = torch.get_device_module(device).get_rng_state()
    return found


def _set_random_state(states: list[Mapping[str, torch.Tensor]], step: CompiledStep) -> None:
    """Each rank's own, if there are as many as there were; the first one's, which steps draw from, if not."""
    world = World(step.layout.side)
    own = states[world.place if len(states) == world.size else 0]
    torch.set_rng_state(own["cpu"])
    kind = step.layout.device.type
    if kind != "cpu" and kind in own:
        torch.get_device_module(kind).set_rng_state(own[kind])
