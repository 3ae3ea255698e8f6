"""Sharding a model's parameters over data ranks, in place: each stays the same object and becomes a DTensor."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from graphcomp.compat.blocks import placed_as, rows_over
from graphcomp.compat.modules import has_hooks
from graphcomp.compat.sharded import hindrance, local_rows, recurrent_lists_renewed, shard_in_place
from graphcomp.compat.tensor_parallel import over_tensor_ranks, part_shape
from graphcomp.dataparallel.rows import padded_rows
from graphcomp.dataparallel.spec import Shards, Spec
from graphcomp.errors import AgreementError, PlanError, RankFailure, StateError
from graphcomp.runtime.ranks.difference import first_difference
from graphcomp.runtime.state.live import overlaps
from graphcomp.runtime.state.optimizer_state import HeldState, held_state


@dataclass(frozen=True)
class _Work:
    """What is to be done with a model. whole: without dimensions, equal on all ranks. state: what optimizers hold."""

    found: dict[str, Shards] = field(default_factory=dict)
    split: dict[str, nn.Parameter] = field(default_factory=dict)
    whole: dict[str, nn.Parameter] = field(default_factory=dict)
    state: tuple[HeldState, ...] = ()

    def text(self) -> list[str]:
        """One line for everything that all data ranks must have in common."""
        lines = [f"'{name}' sharded, {one.spec}" for name, one in self.found.items() if name not in self.split]
        for name, p in {**self.split, **self.whole}.items():
            grown = "with" if p.grad is not None else "without"
            lines.append(f"'{name}' {tuple(p.shape)} {p.dtype}, requires_grad={p.requires_grad}, {grown} gradient")
        return lines + sorted(map(str, self.state))


def shard_parameters(model: nn.Module, mesh: DeviceMesh) -> dict[str, Shards]:
    """Split the rows of every parameter over the ranks of a mesh of one axis, as `torch.chunk` does.

    Each parameter with a dimension becomes a DTensor with `Shard(0)`: the same object, so that tied names stay tied and
    optimizers keep working; what these hold of its shape, and its `.grad`, are split with it. Of one that is laid out
    over tensor ranks, the rows of each part are. One without dimensions stays whole. Those on meta are left alone; what
    is split over this mesh already stays as it is.

    All ranks get the values of rank 0, also where they began with others; of gradients and of optimizers' state each
    rank keeps its own rows. All ranks of the mesh must call it. Returns, by name, what is split now.

    Raises StateError for a parameter that cannot be split in place, AgreementError where ranks have different models,
    RankFailure where another rank raised; then nothing has changed.
    """
    if mesh.ndim != 1:
        raise PlanError("parameters are sharded over one mesh axis", expected="a mesh of one axis", got=str(mesh))
    work, failure = _Work(), None
    with recurrent_lists_renewed(model):
        try:
            work = _look(model, mesh)
        except Exception as error:
            failure = error
        _agree(work, failure, mesh)
        _split(work, mesh)
    return work.found


def sharding_text(model: nn.Module, mesh: DeviceMesh) -> str:
    """What `shard_parameters` would find, one line for everything that all ranks of the mesh must have in common.

    Raises StateError as that does; changes nothing and talks to nobody.
    """
    with recurrent_lists_renewed(model):
        return "\n".join(_look(model, mesh).text())


def _look(model: nn.Module, mesh: DeviceMesh) -> _Work:
    """What is to be done; raises StateError for what cannot be done. Changes nothing."""
    parameters = {name: p for name, p in model.named_parameters() if p.device.type != "meta"}
    buffers = {name: b for name, b in model.named_buffers() if b.layout is torch.strided}
    shared = overlaps({**parameters, **buffers})
    work, ranks = _Work(), mesh.size()
    for name, parameter in parameters.items():
        if name in shared:
            raise _refusal(name, f"shares memory with '{shared[name]}'", "give each its own memory, or tie them")
        if parameter.device.type != mesh.device_type:
            raise _refusal(name, f"is on {parameter.device}", f"move the model to {mesh.device_type} before")
        found, part = placed_as(parameter), over_tensor_ranks(parameter)
        if found == part:
            _check_own(name, parameter)
            (work.split if parameter.dim() else work.whole)[name] = parameter
        elif found is not None and found != rows_over(mesh, part):
            placed = f"is a DTensor already, {found.placements} over {found.mesh}"
            raise _refusal(name, placed, "shard it over the plan's axis 'dp' alone, or leave that to the plan")
        if parameter.dim():
            spec = Spec(name, part_shape(parameter), parameter.dtype, mesh.device_type)
            work.found[name] = Shards(spec, ranks)
    state = held_state(work.split)
    return _Work(work.found, work.split, work.whole, state)


def _check_own(name: str, parameter: nn.Parameter) -> None:
    """A plain parameter, or a DTensor over tensor ranks alone."""
    if type(parameter) not in (nn.Parameter, DTensor):
        raise _refusal(name, f"is of class {type(parameter).__name__}", "use a plain torch.nn.Parameter")
    if parameter.layout is not torch.strided or not local_rows(parameter).is_contiguous():
        form = f"strides {parameter.stride()}" if parameter.layout is torch.strided else f"layout {parameter.layout}"
        raise _refusal(name, f"is not dense, row after row: it has {form}", "make it contiguous before")
    if has_hooks(parameter):
        raise _refusal(name, "has a gradient hook", "remove the hook and change .grad after the step")
    gradient = parameter.grad
    alike = gradient is None or (
        type(gradient) in (torch.Tensor, DTensor)
        and gradient.layout is torch.strided
        and placed_as(gradient) == placed_as(parameter)
    )
    if not alike:
        raise _refusal(name, f"has a gradient of another kind: {type(gradient).__name__}", "call zero_grad() before")
    used = hindrance(parameter) if parameter.dim() else None
    if used is not None:
        raise _refusal(name, f"is in use: {used}", "let go of earlier losses and outputs, and of weak references")


def _refusal(name: str, got: str, do: str) -> StateError:
    return StateError(f"parameter '{name}' cannot be sharded in place", got=f"it {got}", do=do)


def _agree(work: _Work, failure: Exception | None, mesh: DeviceMesh) -> None:
    """Let all ranks go on, or none. Raises this rank's own error if it has one."""
    if mesh.size() > 1:
        group = mesh.get_group()
        everyone: list[Any] = [None] * mesh.size()
        dist.all_gather_object(everyone, (None if failure is None else str(failure), work.text()), group=group)
    else:
        everyone = [(None, work.text())]
    if failure is not None:
        raise failure
    for rank, (problem, lines) in enumerate(everyone):
        if problem is not None:
            raise RankFailure("the parameters could not be sharded", where=f"data rank {rank}", got=problem)
        first = everyone[0][1]
        if lines != first:
            expected, got = first_difference(first, lines, "no more parameters")
            raise AgreementError(
                "the data ranks have different parameters to shard",
                where=f"data ranks 0 and {rank}",
                expected=expected,
                got=got,
                do="build the same model, with the same gradients and optimizers, on every rank",
            )


def _split(work: _Work, mesh: DeviceMesh) -> None:
    """Fetch all new values; then, with nothing left that could fail, put them in the place of the old ones."""
    rank = mesh.get_local_rank()
    with torch.no_grad():
        new = {name: _from_first(work.found[name], local_rows(p.detach()), mesh) for name, p in work.split.items()}
        numbers = {name: _copy_of_first(local_rows(p.detach()), mesh) for name, p in work.whole.items()}
        gradients = {
            name: _own_rows(work.found[name], local_rows(p.grad), rank)
            for name, p in work.split.items()
            if p.grad is not None
        }
        held = [(one, _own_rows(work.found[one.name], local_rows(one.value), rank)) for one in work.state]
        for name, parameter in work.split.items():
            shard_in_place(parameter, new[name], mesh, gradients.get(name))
        for name, parameter in work.whole.items():
            local_rows(parameter).copy_(numbers[name])
        for one, rows in held:
            one.replace(rows)


def _own_rows(of: Shards, whole: torch.Tensor, rank: int) -> torch.Tensor:
    """This rank's rows, in memory of their own."""
    begin = min(rank * of.chunk, of.rows)
    return whole.narrow(0, begin, of.rows_of(rank)).clone(memory_format=torch.contiguous_format)


def _from_first(of: Shards, whole: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """This rank's rows of what rank 0 holds, in memory of their own."""
    rank = mesh.get_local_rank()
    if mesh.size() == 1 or not whole.numel():
        return _own_rows(of, whole, rank)
    padded = whole.new_empty(of.padded)
    parts = [_bytes(padded_rows(of, whole, each)) for each in range(of.ranks)] if rank == 0 else None
    dist.scatter(_bytes(padded), parts, group=mesh.get_group(), group_src=0)
    rows = padded.narrow(0, 0, of.rows_of(rank))
    return rows if of.rows_of(rank) == of.chunk else rows.clone()


def _copy_of_first(number: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    copied = number.clone()
    if mesh.size() > 1:
        dist.broadcast(_bytes(copied.view(1)), group=mesh.get_group(), group_src=0)
    return copied


def _bytes(dense: torch.Tensor) -> torch.Tensor:
    """The same memory as bytes, which every process group can move, whatever the dtype."""
    return dense.view(-1).view(torch.uint8)
