"""Parameters of which every tensor rank holds a part (axis `tp`): DTensors, as `parallelize_module` makes them.

Whether `loss_parallel` is on has no public name, nor has what torch keeps of operators on DTensors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.distributed.tensor.parallel.loss import customized_loss_ops

from graphcomp.compat.blocks import Placed, along

AXIS = "tp"


def is_part(tensor: object) -> bool:
    """Whether a tensor is a DTensor over the axis `tp` alone."""
    return isinstance(tensor, DTensor) and tensor.device_mesh.mesh_dim_names == (AXIS,)


def over_tensor_ranks(tensor: torch.Tensor) -> Placed | None:
    """How a tensor is laid over the tensor ranks, whatever data ranks hold of each part; None for a plain one."""
    return along(tensor, AXIS)


def part_shape(tensor: torch.Tensor) -> tuple[int, ...]:
    """The shape of this tensor rank's part, whole over data ranks; of what is not laid out, its own."""
    found = over_tensor_ranks(tensor)
    block = None if found is None else found.block(tensor.shape)
    return tuple(tensor.shape) if block is None else tuple(one.stop - one.start for one in block)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """What programs take in the place of a parameter or buffer: the part that this tensor rank holds, or the tensor
    itself. On meta if data ranks hold rows of the part."""
    if is_part(tensor):
        return tensor._local_tensor  # type: ignore[attr-defined]
    if over_tensor_ranks(tensor) is None:
        return tensor
    return torch.empty(part_shape(tensor), dtype=tensor.dtype, device="meta")


def placed(tensor: torch.Tensor) -> str:
    """How a tensor is laid over the tensor ranks; empty for a plain one."""
    found = over_tensor_ranks(tensor)
    return "" if found is None else str(found.placements)


def axis_of(mesh: DeviceMesh | None) -> DeviceMesh | None:
    """The tensor ranks of a mesh, as a mesh of one axis; None if it has none."""
    return mesh[AXIS] if mesh is not None and AXIS in (mesh.mesh_dim_names or ()) else None


def whole_like(local: torch.Tensor, like: torch.Tensor, mesh: DeviceMesh | None = None) -> DTensor:
    """A DTensor made of this rank's part, laid over tensor ranks like another. Differentiable: the gradient of the part
    is the part of the gradient. mesh: an equal one to take in the place of its own."""
    found = over_tensor_ranks(like)
    if found is None:
        raise TypeError("expected a tensor that is laid out over tensor ranks")
    mesh = found.mesh if mesh is None else mesh
    return DTensor.from_local(local, mesh, found.placements, run_check=False, shape=like.shape, stride=like.stride())


def whole(value: Any) -> Any:
    """The whole of a DTensor, which every rank then has; anything else as it is."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def part_like(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """This rank's part of a value, laid out like `like`; all of it where `like` is plain."""
    if not isinstance(value, DTensor):
        return value
    if not isinstance(like, DTensor):
        return value.full_tensor()
    return value.redistribute(placements=like.placements).to_local()


def forget_meshes() -> None:
    """Let no operator on DTensors go by what torch has kept of earlier ones.

    That includes their meshes; and a mesh that is equal to the present one may have process groups that are gone.
    """
    _clear_sharding_prop_cache()


def loss_parallel_is_on() -> bool:
    """Whether code runs in `torch.distributed.tensor.parallel.loss_parallel`, which replaces operators for a while."""
    handlers = DTensor._op_dispatcher._custom_op_handlers
    return all(handlers.get(operator) is own for operator, own in customized_loss_ops.items())


def parts(model: nn.Module) -> dict[str, Any]:
    """The parameters and buffers that are DTensors, by name."""
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: tensor for name, tensor in state.items() if isinstance(tensor, DTensor)}
