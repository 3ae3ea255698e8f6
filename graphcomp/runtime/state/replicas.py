"""Parameters that every data rank holds whole: all of them begin with the values of the first rank."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from graphcomp.compat.sharded import local_rows


def copy_from_first(model: nn.Module, mesh: DeviceMesh) -> None:
    """Give every parameter the values that rank 0 of a mesh of one axis has; those on meta are left alone.

    All ranks of the mesh must call it, with parameters of the same shapes and dtypes. Gradients that are reduced alike
    then keep all copies equal, bit by bit.
    """
    group = mesh.get_group()
    with torch.no_grad():
        for parameter in model.parameters():
            own = local_rows(parameter)
            if own.device.type == "meta" or not own.numel():
                continue
            dense = own.detach().contiguous().view(-1).view(torch.uint8)  # every process group can move bytes
            dist.broadcast(dense, group=group, group_src=0)
            if not own.is_contiguous():
                own.copy_(dense.view(own.dtype).view(own.shape))
