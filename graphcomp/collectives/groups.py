"""The ranks that a collective runs over."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from graphcomp.errors import CollectiveError


@dataclass(frozen=True)
class Group:
    """name: by which torch knows the process group. ranks: global ranks, in the order of the group.

    Nothing here says which of them this process is: what a collective does is the same text on every rank.
    """

    name: str
    ranks: tuple[int, ...]

    @property
    def size(self) -> int:
        return len(self.ranks)


def group_of(group: object, collective: str) -> Group:
    """The ranks behind a process group or a one-axis mesh. Raises CollectiveError for anything else."""
    found = group
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            axes = ", ".join(group.mesh_dim_names or ()) or f"{group.ndim} axes"
            raise CollectiveError(
                "a collective runs over one axis of a mesh",
                where=f"collectives.{collective}",
                expected="a DeviceMesh of one axis, or a process group",
                got=f"a DeviceMesh of {axes}",
                do=f"name the axis: mesh[{(group.mesh_dim_names or ('dp',))[0]!r}]",
            )
        found = group.get_group()
    if not isinstance(found, dist.ProcessGroup):
        raise CollectiveError(
            "a collective needs the group of ranks it runs over",
            where=f"collectives.{collective}",
            expected="a process group that this process is in, or a DeviceMesh of one axis",
            got=f"{type(found).__name__} {found!r}",
            do="use torch.distributed.group.WORLD, new_group(...) or mesh['dp']; only members may call",
        )
    return Group(found.group_name, tuple(dist.get_process_group_ranks(found)))
