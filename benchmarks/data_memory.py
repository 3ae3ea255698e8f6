"""What a contestant keeps between steps and adds within one, in bytes.

torch's profiler tells of memory on the threads that it watches, and the communication of a data-parallel step lives
on others. So this counts below torch, in malloc: `counted_malloc.c` is built with the C compiler that Inductor needs
too, and loaded into the processes that measure, before their C library.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch.distributed as dist
from data_systems import Contestant
from systems import Batches

SOURCE = Path(__file__).parent / "counted_malloc.c"
PRELOAD = "LD_PRELOAD"


@contextlib.contextmanager
def counting() -> Iterator[bool]:
    """Processes that are started within count; False where that cannot be had: another C library, no compiler."""
    compiler = shutil.which(os.environ.get("CC", "gcc"))
    if compiler is None or not sys.platform.startswith("linux"):
        yield False
        return
    before = os.environ.get(PRELOAD)
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "counted_malloc.so"
        made = subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", library, SOURCE], capture_output=True)
        if made.returncode:
            yield False
            return
        os.environ[PRELOAD] = f"{library} {before}" if before else str(library)
        try:
            yield True
        finally:
            if before is None:
                del os.environ[PRELOAD]
            else:
                os.environ[PRELOAD] = before


def held_and_peak(make: Callable[[], Contestant], batches: Batches) -> tuple[int, int]:
    """Bytes in large blocks: between steps, without gradients, and at most within a step; above those before `make`.

    Parameters in whatever form, gradients, buffers of the communication. Give it microbatches so small that
    activations do not matter. Call it in a process that was started within `counting`.
    """
    count = ctypes.CDLL(None)
    count.counted_held.restype = count.counted_most.restype = ctypes.c_long
    gc.collect()
    before = count.counted_held()
    contestant = make()
    for _ in range(3):
        contestant.run(batches)
    contestant.forget()
    gc.collect()
    dist.barrier()
    held = count.counted_held()
    count.counted_restart()
    contestant.run(batches)
    dist.barrier()
    return held - before, count.counted_most() - before
