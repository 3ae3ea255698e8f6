"""A checkpoint is written beside its place by all ranks together, and put there when all is well."""

from __future__ import annotations

import contextlib
import io
import shutil
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor

from graphcomp.checkpoint.optimizers import merged
from graphcomp.compat.sharded import local_rows, sharded_like
from graphcomp.errors import CheckpointError, error_text

if TYPE_CHECKING:
    from graphcomp.step import CompiledStep

PLAIN = "graphcomp.pt"
"""The file with all that is no tensor of the model or the optimizer. It is written last: a folder with it is whole."""

Result = TypeVar("Result")


@dataclass(frozen=True)
class Contents:
    """What one rank has to save. plain: a dict, as bytes."""

    tensors: Mapping[str, torch.Tensor]
    plain: bytes

    def copied(self) -> Contents:
        """The tensors in memory of their own, on the host."""
        return replace(self, tensors={name: _copied(tensor) for name, tensor in self.tensors.items()})


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    rows = local_rows(tensor).detach().to("cpu", copy=True)
    return sharded_like(rows, tensor) if isinstance(tensor, DTensor) else rows


def as_bytes(plain: Mapping[str, Any]) -> bytes:
    """Raises CheckpointError for what could not be loaded again without running code of the file."""
    written = io.BytesIO()
    try:
        torch.save(plain, written)
        from_bytes(written.getvalue())
    except Exception as error:
        raise CheckpointError(
            "`extra`, or a number that the optimizer holds, cannot be saved",
            expected="tensors, numbers, texts, None, and lists, tuples and dicts of them",
            got=str(error).splitlines()[0],
            do="pass what state_dict() of your objects returns",
        ) from error
    return written.getvalue()


def from_bytes(written: bytes) -> dict[str, Any]:
    loaded: dict[str, Any] = torch.load(io.BytesIO(written), map_location="cpu", weights_only=True)
    return loaded


def alone() -> None:
    """Torch need not say that this process reads or writes by itself.

    The filter stays: one that is taken away again would take away what another thread has set meanwhile.
    """
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")


def find(folder: Path) -> Path:
    """Where a checkpoint is; that may be beside its place, if a process ended while it was being replaced."""
    found = next((each for each in (folder, _old(folder)) if (each / PLAIN).is_file()), None)
    if found is None:
        got = "another folder" if folder.is_dir() else "a file" if folder.exists() else "nothing"
        raise CheckpointError(
            "there is no checkpoint", where=str(folder), expected=f"a folder with '{PLAIN}' in it", got=got
        )
    return found


@dataclass(frozen=True)
class World:
    """The ranks that save together. group: gloo; None: this process alone."""

    group: dist.ProcessGroup | None

    @property
    def place(self) -> int:
        return 0 if self.group is None else dist.get_rank(self.group)

    @property
    def size(self) -> int:
        return 1 if self.group is None else dist.get_world_size(self.group)

    def each(self, work: Callable[[], Result]) -> list[Result]:
        """What `work` returns on each rank. If it raises on one, all raise CheckpointError."""
        own: Any = None
        failure: Exception | None = None
        try:
            own = work()
        except Exception as error:
            failure = error
        everyone: list[Any] = [(own, None if failure is None else error_text(failure))]
        if self.group is not None:
            said, everyone = everyone[0], [None] * self.size
            dist.all_gather_object(everyone, said, group=self.group)
        for rank, (_, text) in enumerate(everyone):
            if text is not None:
                raise _not_written(rank, text) from failure
        return [result for result, _ in everyone]

    def first(self, work: Callable[[], object]) -> None:
        """On the first rank only; if that fails, all raise."""
        self.each(work if self.place == 0 else _nothing)


class Background:
    """Writes one checkpoint after the other in a thread, which talks over a group of its own."""

    def __init__(self, step: CompiledStep) -> None:
        limit = timedelta(seconds=step.plan.deadline)
        own = None if step.layout.side is None else dist.new_group(timeout=limit, backend="gloo")
        self.world, self.thread = World(own), ThreadPoolExecutor(1, "graphcomp saves")
        self.last: Future[None] | None = None

    def begin(self, folder: Path, contents: Contents) -> Future[None]:
        self.last = self.thread.submit(_write_by_itself, self.world, folder, contents)
        return self.last


_BACKGROUND: WeakKeyDictionary[CompiledStep, Background] = WeakKeyDictionary()


def write(step: CompiledStep, folder: Path, contents: Contents) -> None:
    """Returns when it is written; what the background has begun comes first."""
    before = _BACKGROUND[step].last if step in _BACKGROUND else None
    if before is not None:
        before.exception()

    def work() -> CheckpointError | None:
        try:
            _write(World(step.layout.side), folder, contents)
        except CheckpointError as error:  # all ranks have the same: the step goes on
            return error
        return None

    failure = step.together("saving a checkpoint", work)
    if failure is not None:
        raise failure


def begin(step: CompiledStep, folder: Path, contents: Contents) -> Future[None]:
    """Write it in the background."""
    if step not in _BACKGROUND:
        _BACKGROUND[step] = step.together("preparing to save in the background", lambda: Background(step))
    return _BACKGROUND[step].begin(folder, contents)


def leave(step: CompiledStep) -> None:
    """Come back when what the background has begun is written; it begins nothing more."""
    background = _BACKGROUND.pop(step, None)
    if background is not None:
        background.thread.shutdown()
        if background.world.group is not None:
            with contextlib.suppress(ValueError):  # destroyed already, with all others
                dist.destroy_process_group(background.world.group)


def _write(world: World, folder: Path, contents: Contents) -> None:
    """Raises CheckpointError on all ranks, with nothing changed, if one of them fails."""
    temporary = folder.with_name(f"{folder.name}.saving")
    try:
        world.first(lambda: _prepare(temporary, folder))
        plains = world.each(lambda: contents.plain)
        _write_tensors(world, temporary, contents.tensors)
        world.first(lambda: (temporary / PLAIN).write_bytes(as_bytes(_joined(plains))))
        world.first(lambda: _put(temporary, folder))
    except CheckpointError:
        if world.place == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        raise


def _write_by_itself(world: World, folder: Path, contents: Contents) -> None:
    """Where nobody else says that another rank is gone."""
    try:
        _write(world, folder, contents)
    except CheckpointError:
        raise
    except Exception as error:
        raise _not_written(world.place, error_text(error)) from error


def _write_tensors(world: World, folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    writer, group = dcp.FileSystemWriter(folder), world.group
    try:
        if group is None:
            alone()
        dcp.save(dict(tensors), storage_writer=writer, process_group=group, no_dist=group is None)
    except dcp.CheckpointException as failed:  # the same on all ranks
        rank, (error, _) = min(failed.failures.items(), key=lambda item: item[0])
        raise _not_written(rank, error_text(error)) from error


def _joined(plains: list[bytes]) -> dict[str, Any]:
    """Of all ranks: the first one's, each one's random streams, and the optimizer's state of all."""
    every = list(map(from_bytes, plains))
    return {
        **every[0],
        "random": [one["random"] for one in every],
        "optimizer": merged(one["optimizer"] for one in every),
    }


def _prepare(temporary: Path, folder: Path) -> None:
    taken = folder.exists() and not (folder.is_dir() and ((folder / PLAIN).is_file() or not any(folder.iterdir())))
    if taken:
        raise CheckpointError("the place of the checkpoint is taken by something else", where=str(folder))
    if temporary.exists():  # left by a process that ended
        shutil.rmtree(temporary)
    temporary.mkdir(parents=True)


def _put(temporary: Path, folder: Path) -> None:
    old = _old(folder)
    if folder.exists():
        if old.exists():
            shutil.rmtree(old)
        folder.rename(old)
    temporary.rename(folder)
    if old.exists():
        shutil.rmtree(old)


def _old(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.old")


def _not_written(rank: int, text: str) -> CheckpointError:
    return CheckpointError(
        "the checkpoint was not written",
        where=f"rank {rank}",
        got=text,
        do="see to the cause and save again; what was there before is as it was",
    )


def _nothing() -> None:
    pass
