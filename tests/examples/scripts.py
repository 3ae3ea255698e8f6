"""Run an example as a script in processes that are there already, in an environment as torchrun makes it."""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist

from graphcomp.testing import run_ranks

EXAMPLES = Path(__file__).parents[2] / "examples"
Watching = Callable[[], contextlib.AbstractContextManager[Callable[[], Any]]]
"""What is around the script: gives a function to call when it has ended."""


@contextlib.contextmanager
def nothing() -> Any:
    yield lambda: None


@contextlib.contextmanager
def showing() -> Iterator[Callable[[], str]]:
    """Tells what the script shows."""
    with contextlib.redirect_stdout(io.StringIO()) as text:
        yield text.getvalue


def run_script(name: str, processes: int, *options: str, watching: Watching = nothing) -> list[Any]:
    """What `watching` tells of each rank. With one process the script knows of no other."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return run_ranks(_script, processes, name, processes, options, port, watching, timeout=120)


def _script(rank: int, name: str, processes: int, options: tuple[str, ...], port: int, watching: Watching) -> Any:
    dist.destroy_process_group()  # the script makes its own
    if processes == 1:
        for variable in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
            del os.environ[variable]
    else:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), LOCAL_WORLD_SIZE=str(processes))
    sys.argv = [name, *options]
    sys.path.insert(0, str(EXAMPLES))
    left = None
    with watching() as seen:
        try:
            runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        except SystemExit as end:
            left = end.code
    if left:
        raise RuntimeError(f"{name} left with {left}")
    return seen()
