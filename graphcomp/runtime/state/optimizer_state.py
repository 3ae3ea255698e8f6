"""What optimizers hold for a parameter, such as momentum, split with it.

Whoever shards a model sees no optimizer; but those of this process can be found, and a parameter keeps its identity, so
what they hold for it can be split as well.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from graphcomp.compat.blocks import Placed, placed_as, rows_over
from graphcomp.compat.sharded import local_rows, rows_like, sharded_like
from graphcomp.compat.tensor_parallel import over_tensor_ranks
from graphcomp.errors import StateError

Rows = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class HeldState:
    """A whole tensor of a parameter's shape that an optimizer holds for it, under a key of a table."""

    owner: str
    name: str
    key: str
    table: dict[str, Any]
    parameter: torch.Tensor

    def __str__(self) -> str:
        return f"{self.owner} holds '{self.key}' for '{self.name}', {self.value.dtype}"

    @property
    def value(self) -> torch.Tensor:
        found: torch.Tensor = self.table[self.key]
        return found

    def replace(self, rows: torch.Tensor) -> None:
        """Once the parameter is split: hold these rows, in a DTensor like the parameter."""
        self.table[self.key] = sharded_like(rows, self.parameter)


def held_state(parameters: Mapping[str, torch.Tensor]) -> tuple[HeldState, ...]:
    """What the optimizers of this process hold for these parameters and has to be split with them.

    Numbers, such as step counters, stay. Raises StateError for a tensor of another shape: nobody knows its rows.
    """
    found: dict[tuple[int, str], HeldState] = {}
    for optimizer in [each for each in gc.get_objects() if issubclass(type(each), Optimizer)]:
        for name, parameter in parameters.items():
            for one in _of_parameter(optimizer, name, parameter, {placed_as(parameter)}):
                found.setdefault((id(one.table), one.key), one)
    return tuple(found.values())


def shard_optimizer_state(optimizer: Optimizer) -> None:
    """Split what an optimizer holds whole for sharded parameters, as it does after `load_state_dict` of whole tensors.

    Each rank keeps its own rows; nothing is sent. Raises StateError for a tensor of another shape, before any effect.
    """
    groups = enumerate(optimizer.param_groups)
    parameters = {f"{i} of group {g}": p for g, group in groups for i, p in enumerate(group["params"])}
    sharded = {name: p for name, p in parameters.items() if isinstance(p, DTensor)}
    found: list[HeldState] = []
    for name, parameter in sharded.items():
        kinds = {None, over_tensor_ranks(parameter)} - {placed_as(parameter)}
        found += _of_parameter(optimizer, name, parameter, kinds)
    for one in found:
        one.replace(_own(one.parameter, one.value))


def _own(parameter: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor that is whole, or laid over tensor ranks alone, in memory of its own."""
    placed = placed_as(parameter)
    if placed is None or not isinstance(value, DTensor):
        return local_rows(rows_like(parameter, value)).clone()
    local, data = local_rows(value), (placed.mesh.mesh_dim_names or ())[0]
    return local[rows_over(placed.mesh[data]).block(local.shape)].clone()


def _of_parameter(
    optimizer: Optimizer, name: str, parameter: torch.Tensor, kinds: Collection[Placed | None]
) -> Iterator[HeldState]:
    """What is laid over ranks in one of these ways, and so has to be split."""
    owner, table = type(optimizer).__name__, optimizer.state.get(parameter, {})
    for key, value in table.items():
        if not any(_is_one_of(kinds, each) for each in _inside(value)):
            continue
        if not isinstance(value, torch.Tensor) or value.shape != parameter.shape or value.layout is not torch.strided:
            raise StateError(
                f"optimizer state cannot be split over data ranks: {owner} holds '{key}' for parameter '{name}'",
                expected=f"a tensor of the parameter's shape {tuple(parameter.shape)}, or numbers",
                got=f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__,
                do="make the optimizer when the parameters are sharded already, or replicate them",
            )
        yield HeldState(owner, name, key, table, parameter)


def _is_one_of(kinds: Collection[Placed | None], value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0 and placed_as(value) in kinds


def _inside(value: object) -> list[object]:
    if isinstance(value, Mapping):
        return list(value.values())
    return list(value) if isinstance(value, (list, tuple)) else [value]
