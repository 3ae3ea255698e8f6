"""Process groups by name, the job's store, and a way out of groups: torch has no public name for any of them."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import (
    _abort_process_group,
    _get_default_store,
    _resolve_process_group,
    _world,
)

_UNUSED_TAG = 0x6C656176
"""Of a receive that nobody ever sends anything for."""


def group_of(name: str) -> dist.ProcessGroup:
    """The process group with this name. Graphs hold names, and torch has no public way back from them."""
    return _resolve_process_group(name)  # type: ignore[arg-type]


def ranks_of(name: str) -> tuple[int, ...]:
    """The global ranks of the process group with this name, in the order of the group."""
    return tuple(dist.get_process_group_ranks(group_of(name)))


def job_store() -> dist.Store:
    """The store through which the processes of this job found each other. Raises if there is no process group."""
    return _get_default_store()


def cut_off(group: dist.ProcessGroup) -> None:
    """Close this process's connections of a group: what waits on them, here and in the other processes, raises.

    gloo has no call for it, and closes them only with the last reference to the group. But an operation that times out
    closes all of them at once: so one is begun that nobody answers. It fails at once, without closing anything, on a
    connection that is gone already; hence one for every peer. Other backends have `abort`.
    """
    if torch.device("cpu") in group._device_types:
        for peer in range(group.size()):
            if peer != group.rank():
                try:
                    group.recv([torch.empty(1, dtype=torch.uint8)], peer, _UNUSED_TAG).wait(timedelta(milliseconds=1))
                except RuntimeError:
                    continue
    group.abort()


def give_up(group: dist.ProcessGroup) -> None:
    """Cut a group off and take it from torch's registers, without waiting for anybody. For groups of one's own."""
    cut_off(group)
    if group in _world.pg_map:
        _abort_process_group(group)
