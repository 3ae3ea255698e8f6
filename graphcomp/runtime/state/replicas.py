"""State that every data rank holds whole: all of them begin with the values of the first rank."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from graphcomp.compat.sharded import local_rows


def copy_from_first(tensors: Iterable[torch.Tensor], mesh: DeviceMesh) -> None:
    """Give these the values that rank 0 of a mesh of one axis has; those on meta are left alone.

    All ranks of the mesh must call it, with tensors of the same shapes and dtypes. Gradients that are reduced alike
    then keep all copies equal, bit by bit.
    """
    group = mesh.get_group()
    with torch.no_grad():
        for tensor in tensors:
            own = _once(local_rows(tensor))
            if own.device.type == "meta" or not own.numel():
                continue
            dense = own.detach().contiguous().view(-1).view(torch.uint8)  # every process group can move bytes
            dist.broadcast(dense, group=group, group_src=0)
            if not own.is_contiguous():
                own.copy_(dense.view(own.dtype).view(own.shape))


def _once(tensor: torch.Tensor) -> torch.Tensor:
    """A view that shows each element in memory once: of an expanded dimension, its first."""
    for dimension, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        tensor = tensor.narrow(dimension, 0, 1) if stride == 0 and size > 1 else tensor
    return tensor
