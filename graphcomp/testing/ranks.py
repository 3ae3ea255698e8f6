"""Run a function in several processes of this machine that form a gloo process group."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import pickle
import random
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from graphcomp.errors import PlanError, RankFailure

_GRACE = 0.3
"""Seconds to listen on after the first bad news: what happened first is not always what is heard first."""

_PRELOADED = ["torch", "graphcomp", "graphcomp.testing", "graphcomp.compat.heavy"]
"""What the process that all ranks are copied from has imported."""

_CONSEQUENCES = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Connection refused")


@dataclass(frozen=True)
class _Failure:
    """An error on its way to the parent. `pickled` is None where the exception cannot travel."""

    rank: int
    when: float
    text: str
    pickled: bytes | None = None
    notes: Sequence[str] = field(default_factory=list)
    secondary: bool = False

    def order(self) -> tuple[bool, float]:
        """An error that only says that another process has gone never comes before that process's own."""
        return self.secondary, self.when


def run_ranks(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 300.0, fresh: bool = False
) -> list[Any]:
    """Call `fn(rank, *args)` in `world_size` new processes and return the results in rank order.

    In each process the default process group (gloo) is up, PyTorch uses one thread, and RANK, LOCAL_RANK and
    WORLD_SIZE are set. `fn` (at the top of a module), `args` and the results must be picklable. No process
    leaves the group before all have returned.

    fresh: start each process anew, as torchrun does, with a seed of its own for the hashes of texts (so sets are
        in another order in each); that takes seconds. Otherwise they are copies of one process that has imported torch.

    If a process raises, the others are killed and the error that came first in time is raised here, with its
    own type and a note that holds its rank and traceback. A process that dies without an error, and `timeout`
    (seconds for everything), raise RankFailure; the latter shows where each process stands.
    """
    if world_size < 1:
        raise PlanError("run_ranks needs at least one process", expected="world_size >= 1", got=world_size)
    try:
        work = pickle.dumps((fn, args))
    except Exception as error:
        raise PlanError(
            "run_ranks cannot send this function, or its arguments, to other processes",
            got=f"{type(error).__name__}: {error}",
            do="define the function at the top of a module, and pass arguments that can be pickled",
        ) from error
    context = _context(fresh)
    with tempfile.TemporaryDirectory() as folder:
        ranks: list[_Rank] = []
        try:
            for rank in range(world_size):
                here, there = context.Pipe()
                process = context.Process(
                    target=_main,
                    args=(there, rank, world_size, folder, timeout, work, dict(os.environ)),
                    name=f"rank {rank}",
                )
                process.start()
                there.close()
                ranks.append(_Rank(rank, process, here, Path(folder, f"stack{rank}")))
            return _collect(ranks, timeout)
        finally:
            for each in ranks:
                each.close()


def _context(fresh: bool) -> Any:
    if fresh or "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    return context


@dataclass
class _Rank:
    """The parent's hold on one process."""

    rank: int
    process: multiprocessing.process.BaseProcess
    pipe: Connection
    stack: Path

    def read(self) -> _Failure | bytes:
        """What the process sent: its pickled result or a failure; its death if it sent nothing."""
        try:
            kind, content = pickle.loads(self.pipe.recv_bytes())
        except (EOFError, ConnectionError):
            self.process.join(_GRACE)
            code = self.process.exitcode
            how = f"killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
            return _Failure(self.rank, time.monotonic(), f"the process died without an error: {how}")
        return _Failure(**content) if kind == "error" else content

    def where(self) -> str:
        """The Python stack of a process that is still running."""
        if hasattr(signal, "SIGUSR1") and self.process.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, signal.SIGUSR1)
            time.sleep(_GRACE)
        return f"rank {self.rank}:\n{self.stack.read_text() if self.stack.exists() else '  still starting'}"

    def close(self) -> None:
        if self.process.is_alive():
            self.process.kill()
        self.process.join()
        self.pipe.close()


def _collect(ranks: list[_Rank], timeout: float) -> list[Any]:
    deadline = time.monotonic() + timeout
    waiting: dict[object, _Rank] = {each.pipe: each for each in ranks}
    results: dict[int, Any] = {}
    failures: list[_Failure] = []
    while waiting:
        ready = wait([each.pipe for each in waiting.values()], max(0.0, deadline - time.monotonic()))
        for pipe in ready:
            each = waiting.pop(pipe)
            heard = each.read()
            if isinstance(heard, _Failure):
                if not failures:
                    deadline = time.monotonic() + _GRACE
                failures.append(heard)
            else:
                results[each.rank] = pickle.loads(heard)
        if not ready:
            break
    if failures:
        _raise(min(failures, key=_Failure.order), len(ranks))
    if waiting:
        raise RankFailure(
            f"{len(waiting)} of {len(ranks)} processes did not finish in {timeout:g} s",
            got="\n".join(each.where() for each in waiting.values()),
        )
    for each in ranks:
        each.pipe.send_bytes(b"leave")
    for each in ranks:
        each.process.join()
    return [results[each.rank] for each in ranks]


def _raise(failure: _Failure, world_size: int) -> None:
    where = f"rank {failure.rank} of {world_size}"
    error: BaseException | None = None
    if failure.pickled is not None:
        with contextlib.suppress(Exception):
            error = pickle.loads(failure.pickled)
    if not isinstance(error, BaseException):
        raise RankFailure("a process failed", where=where, got=failure.text)
    kept = getattr(error, "__notes__", [])
    for note in [*failure.notes, f"raised on {where}:\n{failure.text}"]:
        if note not in kept:
            error.add_note(note)
    raise error


def _main(
    pipe: Connection, rank: int, world_size: int, folder: str, timeout: float, work: bytes, environment: dict[str, str]
) -> None:
    """What a process does."""
    _end_with_parent()
    gc.freeze()  # what was copied stays: the collector need not look through it again and again
    random.seed()  # a copy begins with the state of its original, and with its environment
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    os.environ.update(OMP_NUM_THREADS="1", RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    try:
        if hasattr(faulthandler, "register"):
            faulthandler.register(signal.SIGUSR1, Path(folder, f"stack{rank}").open("w"))  # noqa: SIM115
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(str(Path(folder, "store")), world_size),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout),
        )
        fn, args = pickle.loads(work)
        # Plain pickle: the pipe's own would hand tensors over in shared memory, which ends with this process.
        message = pickle.dumps(("result", pickle.dumps(fn(rank, *args))))
    except BaseException as error:
        message = pickle.dumps(("error", vars(_describe(rank, error))))
    pipe.send_bytes(message)
    with contextlib.suppress(EOFError, ConnectionError):
        pipe.recv_bytes()  # all others have returned, too
    if dist.is_initialized():
        dist.destroy_process_group()


def _describe(rank: int, error: BaseException) -> _Failure:
    when, pickled = time.monotonic(), None
    with contextlib.suppress(Exception):
        pickled = pickle.dumps(error)
        pickle.loads(pickled)
    return _Failure(
        rank=rank,
        when=when,
        text="".join(traceback.format_exception(error)),
        pickled=pickled,
        notes=list(getattr(error, "__notes__", [])),
        secondary=isinstance(error, RankFailure) or any(text in str(error) for text in _CONSEQUENCES),
    )


def _end_with_parent() -> None:
    """Leave at once if the parent is gone, even from inside a collective."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
