"""Processes for tests in which ranks fail: each goes on until it has said what it saw, or is dead."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from graphcomp.testing import ranks

PRELOADED = [*ranks._PRELOADED, "tests.faults.model"]
"""The first to ask for a server decides what it imports, also for `run_ranks`."""


def run(fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 90.0, signals: bool = False) -> list[Any]:
    """What `fn(rank, *args)` returns in each process of a gloo group, in rank order.

    For a process that died: its exit code, an int. All are forked from one server that has imported what they need, so
    that a group costs a fraction of a second. signals: as soon as each process has sent "ready", each gets a SIGINT
    half a second later. Fails if a process does not end by itself.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    work = pickle.dumps((fn, args))
    deadline = time.monotonic() + timeout
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        try:
            for rank in range(world_size):
                here, there = context.Pipe()
                process = context.Process(target=_main, args=(there, rank, world_size, folder, work))
                process.start()
                there.close()
                pipes.append(here)
                processes.append(process)
            found: list[Any] = [None] * world_size
            waiting = dict(enumerate(pipes))
            while waiting:
                ready = wait(list(waiting.values()), max(0.0, deadline - time.monotonic()))
                assert ready, f"ranks {sorted(waiting)} still run after {timeout:g} s; the others saw {found}"
                for rank, pipe in list(waiting.items()):
                    if pipe not in ready:
                        continue
                    try:
                        heard = pickle.loads(pipe.recv_bytes())
                    except (EOFError, ConnectionError):
                        processes[rank].join(5)
                        heard = processes[rank].exitcode
                    if heard == "ready":
                        found[rank] = heard
                        if signals and all(one == "ready" for one in found):
                            time.sleep(0.5)
                            for one in processes:
                                os.kill(one.pid or 0, signal.SIGINT)
                        continue
                    del waiting[rank]
                    found[rank] = heard
            for rank, process in enumerate(processes):
                process.join(max(0.1, deadline - time.monotonic()))
                assert process.exitcode is not None, f"rank {rank} does not end"
            broken = [one for one in found if isinstance(one, str)]
            assert not broken, "\n".join(broken)
            return found
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join()


def _main(pipe: Any, rank: int, world_size: int, folder: str, work: bytes) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    torch.set_num_threads(1)
    # A background job of a script ignores it, and so would what it starts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    store = dist.FileStore(str(Path(folder, "store")), world_size)
    limit = timedelta(seconds=60)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=limit)
    fn, args = pickle.loads(work)
    _main.pipe = pipe  # type: ignore[attr-defined]
    try:
        said = fn(rank, *args)
    except BaseException as error:
        said = "".join(traceback.format_exception(error))
    pipe.send_bytes(pickle.dumps(said))
    dist.destroy_process_group()


def say_ready() -> None:
    """For `signals`: this process waits for its signal now."""
    _main.pipe.send_bytes(pickle.dumps("ready"))  # type: ignore[attr-defined]
