"""Paired timing, and the most memory that tensors take."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

Run = Callable[[], object]


def paired(
    runs: Mapping[str, Run], repeats: int, steps: int, told: Callable[[str], None] = lambda _: None
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Seconds per step by contestant, one number a repeat: by the clock, and of processor time in this process.

    In each repeat every contestant runs `steps` steps between two barriers; the order turns from repeat to
    repeat, so that whatever slows the machine for a while meets all alike.
    """
    names = list(runs)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    busy: dict[str, list[float]] = {name: [] for name in names}
    for repeat in range(repeats):
        turn = repeat % len(names)
        for name in names[turn:] + names[:turn]:
            dist.barrier()
            begin, worked = time.perf_counter(), time.process_time()
            for _ in range(steps):
                runs[name]()
            busy[name].append((time.process_time() - worked) / steps)
            dist.barrier()
            seconds[name].append((time.perf_counter() - begin) / steps)
        told(f"repeat {repeat + 1} of {repeats}")
    return seconds, busy


def ratios(mine: Sequence[float], theirs: Sequence[float]) -> tuple[float, float]:
    """(smallest, median) of my seconds over theirs, repeat by repeat."""
    each = [m / t for m, t in zip(mine, theirs, strict=True)]
    return min(each), statistics.median(each)


def peak_bytes(run: Run) -> int:
    """Most bytes that torch's CPU allocator had given out at once during `run`, above what there was at its
    start.

    Counts whatever goes through the allocator, in compiled code and in the communication buffers too, on
    all threads; what a kernel keeps on its own stack or gets by `malloc` (both sides use the same matrix
    library) is not seen.
    """
    dist.barrier()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as seen:
        run()
    events = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most
