"""Process groups by name. Graphs hold the name of a group, and torch has no public way back from it."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group


def ranks_of(name: str) -> tuple[int, ...]:
    """The global ranks of the process group with this name, in the order of the group."""
    return tuple(dist.get_process_group_ranks(_resolve_process_group(name)))  # type: ignore[arg-type]
