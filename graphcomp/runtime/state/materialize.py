"""Memory for a model that was built on meta: each rank gets what it holds, in place; the rest stays on meta."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from graphcomp.compat.blocks import Block, Placed, is_whole, placed_as, rows_over
from graphcomp.compat.modules import has_hooks, own_buffers
from graphcomp.compat.sharded import hindrance, local_rows, recurrent_lists_renewed, shard_in_place, sharded_like
from graphcomp.compat.tensor_parallel import over_tensor_ranks
from graphcomp.errors import StateError
from graphcomp.runtime.state.initial import Initial, Recipe
from graphcomp.runtime.state.slots import Slot, is_on_meta, slots_of


@dataclass(frozen=True)
class Holding:
    """Which part of a tensor a rank keeps: its block of one that is laid out over ranks; of that block, or of a whole
    parameter, some rows, if there is a `mesh` to split them over; else the whole."""

    device: torch.device
    mesh: DeviceMesh | None = None

    def placed(self, tensor: torch.Tensor) -> Placed | None:
        """How a tensor is to be laid over ranks; None: every rank keeps the whole."""
        found = placed_as(tensor)
        if self.mesh is None or not isinstance(tensor, nn.Parameter) or not tensor.dim():
            return found
        return rows_over(self.mesh, found) if found == over_tensor_ranks(tensor) else found

    def block(self, tensor: torch.Tensor) -> Block | None:
        """What this rank keeps; None: all that there is."""
        found = self.placed(tensor)
        block = None if found is None else found.block(tensor.shape)
        return None if block is None or is_whole(block, tensor.shape) else block

    def empty(self, tensor: torch.Tensor) -> torch.Tensor:
        """Memory for this rank's part of a tensor."""
        form = local_rows(tensor)
        if self.placed(tensor) == placed_as(tensor):
            return torch.empty_strided(form.shape, form.stride(), dtype=form.dtype, device=self.device)
        block = self.block(tensor) or [slice(0, size) for size in tensor.shape]
        return torch.empty([one.stop - one.start for one in block], dtype=form.dtype, device=self.device)

    def part(self, tensor: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of the values of a tensor, with memory of its own if it is not the whole."""
        block = self.block(tensor)
        return whole if block is None else self.empty(tensor).copy_(whole[block])


def on_meta(model: nn.Module) -> dict[str, Slot]:
    """What has no memory yet, by name, each tensor once."""
    return {slot.name: slot for slot in slots_of(model) if is_on_meta(slot.tensor)}


def check_places(model: nn.Module, holding: Holding) -> None:
    """Raise StateError for a parameter on meta that cannot become a real one in place."""
    with recurrent_lists_renewed(model):
        for slot in on_meta(model).values():
            if isinstance(slot.tensor, nn.Parameter):
                _check_place(slot, holding.placed(slot.tensor) != placed_as(slot.tensor))


def _check_place(slot: Slot, split: bool) -> None:
    tensor = slot.tensor
    if type(tensor) not in (nn.Parameter, DTensor):
        got, do = f"it is of class {type(tensor).__name__}", "use a plain torch.nn.Parameter"
    elif has_hooks(tensor):
        got, do = "it has a gradient hook", "remove the hook and change .grad after the step"
    elif split and not local_rows(tensor).is_contiguous():
        got, do = f"it has strides {tensor.stride()}", "make it contiguous before"
    elif (used := hindrance(tensor)) is not None:
        got, do = f"it is in use: {used}", "let go of what was computed with it, and of weak references"
    else:
        return
    raise StateError(f"parameter '{slot.name}' cannot be materialised in place", got=got, do=do)


def initialisation(
    model: nn.Module, recipe: Recipe, names: Collection[str], holding: Holding, needed: Collection[str] | None = None
) -> Callable[[], None]:
    """What gives these of the tensors on meta their first values. The whole of the others is never made.

    Raises StateError for what cannot be initialised of all that is needed (None: of all on meta), also if it is not
    among `names`: so all ranks raise alike.
    """
    check_places(model, holding)
    slots = on_meta(model)
    initial = Initial(model, recipe, holding.device, needed)

    def part(name: str, whole: torch.Tensor) -> torch.Tensor:
        return holding.part(slots[name].tensor, whole)

    return lambda: place(model, initial.values(names, part), holding)


def allocation(model: nn.Module, names: Collection[str], holding: Holding) -> Callable[[], None]:
    """What gives these of the tensors on meta memory without values. Raises StateError if that cannot be done."""
    check_places(model, holding)
    slots = on_meta(model)
    return lambda: place(model, {name: holding.empty(slots[name].tensor) for name in names}, holding)


def place(model: nn.Module, values: Mapping[str, torch.Tensor], holding: Holding) -> None:
    """Put values in the place of tensors on meta: this rank's part of each, in memory that nobody else uses.

    Parameters stay the same objects, tied where they are tied, with the attributes that were set on them. A buffer is
    replaced under each name that it has.
    """
    slots = on_meta(model)
    with recurrent_lists_renewed(model), torch.no_grad():
        for name, value in values.items():
            tensor = slots[name].tensor
            split = holding.placed(tensor) != placed_as(tensor)
            if split and holding.mesh is not None and isinstance(tensor, nn.Parameter):
                shard_in_place(tensor, value, holding.mesh, None)
                continue
            new = sharded_like(value, tensor) if isinstance(tensor, DTensor) else value
            if isinstance(tensor, nn.Parameter):
                new = nn.Parameter(new, tensor.requires_grad)
                vars(new).update(vars(tensor))
                torch.utils.swap_tensors(tensor, new)
            else:
                for module in model.modules():
                    table = own_buffers(module)
                    table.update({key: new for key, one in table.items() if one is tensor})
