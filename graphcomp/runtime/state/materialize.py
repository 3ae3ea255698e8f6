"""Memory for a model that was built on meta: each rank gets what it holds, in place; the rest stays on meta."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from graphcomp.compat.modules import has_hooks, own_buffers
from graphcomp.compat.sharded import hindrance, recurrent_lists_renewed, shard_in_place
from graphcomp.dataparallel.spec import Shards, Spec
from graphcomp.errors import StateError
from graphcomp.runtime.state.initial import Initial, Recipe
from graphcomp.runtime.state.slots import Slot, is_on_meta, slots_of


@dataclass(frozen=True)
class Holding:
    """Which part of a tensor a rank keeps. mesh: its rows are split over it; None: every rank keeps the whole."""

    device: torch.device
    mesh: DeviceMesh | None = None

    def shards(self, name: str, tensor: torch.Tensor) -> Shards | None:
        """How a tensor is split; None for a buffer, a number, and where nothing is split."""
        if self.mesh is None or not isinstance(tensor, nn.Parameter) or not tensor.dim():
            return None
        return Shards(Spec(name, tuple(tensor.shape), tensor.dtype, self.device.type), self.mesh.size())

    def rows(self, name: str, tensor: torch.Tensor) -> slice | None:
        """Of the first dimension; None: all that there is."""
        of = self.shards(name, tensor)
        if of is None or self.mesh is None:
            return None
        begin = min(self.mesh.get_local_rank() * of.chunk, of.rows)
        return slice(begin, begin + of.rows_of(self.mesh.get_local_rank()))

    def empty(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Memory for this rank's part of a tensor."""
        rows = self.rows(name, tensor)
        if rows is None:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self.device)
        return torch.empty((rows.stop - rows.start, *tensor.shape[1:]), dtype=tensor.dtype, device=self.device)

    def part(self, name: str, tensor: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of the values of a tensor, with memory of its own if it is not the whole."""
        rows = self.rows(name, tensor)
        return whole if rows is None else whole[rows].clone(memory_format=torch.contiguous_format)


def on_meta(model: nn.Module) -> dict[str, Slot]:
    """What has no memory yet, by name, each tensor once."""
    return {slot.name: slot for slot in slots_of(model) if is_on_meta(slot.tensor)}


def check_places(model: nn.Module, holding: Holding) -> None:
    """Raise StateError for a parameter on meta that cannot become a real one in place."""
    with recurrent_lists_renewed(model):
        for slot in on_meta(model).values():
            if isinstance(slot.tensor, nn.Parameter):
                _check_place(slot, holding.shards(slot.name, slot.tensor) is not None)


def _check_place(slot: Slot, split: bool) -> None:
    tensor = slot.tensor
    if type(tensor) is not nn.Parameter:
        got, do = f"it is of class {type(tensor).__name__}", "use a plain torch.nn.Parameter"
    elif has_hooks(tensor):
        got, do = "it has a gradient hook", "remove the hook and change .grad after the step"
    elif split and not tensor.is_contiguous():
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
        return holding.part(name, slots[name].tensor, whole)

    return lambda: place(model, initial.values(names, part), holding)


def allocation(model: nn.Module, names: Collection[str], holding: Holding) -> Callable[[], None]:
    """What gives these of the tensors on meta memory without values. Raises StateError if that cannot be done."""
    check_places(model, holding)
    slots = on_meta(model)
    return lambda: place(model, {name: holding.empty(name, slots[name].tensor) for name in names}, holding)


def place(model: nn.Module, values: Mapping[str, torch.Tensor], holding: Holding) -> None:
    """Put values in the place of tensors on meta: this rank's part of each, in memory that nobody else uses.

    Parameters stay the same objects, tied where they are tied, with the attributes that were set on them. A buffer is
    replaced under each name that it has.
    """
    slots = on_meta(model)
    with recurrent_lists_renewed(model), torch.no_grad():
        for name, value in values.items():
            tensor = slots[name].tensor
            if not isinstance(tensor, nn.Parameter):
                for module in model.modules():
                    table = own_buffers(module)
                    table.update({key: value for key, one in table.items() if one is tensor})
            elif holding.mesh is not None and tensor.dim():
                shard_in_place(tensor, value, holding.mesh, None)
            else:
                new = nn.Parameter(value, tensor.requires_grad)
                vars(new).update(vars(tensor))
                torch.utils.swap_tensors(tensor, new)
