"""The model's live state: parameters and buffers by original name, as each step finds them, written once at its end."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from graphcomp.compat.blocks import placed_as, rows_over
from graphcomp.compat.modules import own_buffers, own_parameters
from graphcomp.compat.sharded import local_rows, sharded_like
from graphcomp.compat.tensor_parallel import is_part, local_part, over_tensor_ranks, part_shape
from graphcomp.dataparallel.rows import pad
from graphcomp.dataparallel.spec import Shards, Spec
from graphcomp.errors import StateError, StepError

Place = tuple[dict[str, Any], str]
"""A module's own table, and a key of it."""


@dataclass(frozen=True)
class _Sharded:
    """A sharded parameter, or this tensor rank's part of one: what data ranks have together, how many rows this
    rank has, and a tensor that has its form only."""

    of: Shards
    rows: int
    form: torch.Tensor

    def rows_in(self, parameter: torch.Tensor) -> torch.Tensor:
        """The rows of this rank. Raises StateError if they have another form than when the model was last read."""
        local, spec = local_rows(parameter), self.of.spec
        if local.shape != (self.rows, *spec.shape[1:]) or local.dtype != spec.dtype:
            raise StateError(
                f"the rows of parameter '{spec.name}' were replaced by others",
                expected=f"{spec.dtype} of shape {(self.rows, *spec.shape[1:])}",
                got=f"{local.dtype} of shape {tuple(local.shape)}",
                do="keep shape and dtype, or make a new step",
            )
        return local


@dataclass(frozen=True)
class Writes:
    """What a step writes: gradients, each with its parameter, and new values of buffers."""

    gradients: tuple[tuple[torch.Tensor, torch.Tensor], ...] = ()
    buffers: tuple[tuple[torch.Tensor, torch.Tensor], ...] = ()

    def write(self) -> None:
        with torch.no_grad():
            for parameter, gradient in self.gradients:
                if parameter.grad is None:
                    parameter.grad = gradient
                else:
                    local_rows(parameter.grad).add_(local_rows(gradient))
            for buffer, value in self.buffers:
                buffer.copy_(value)


class LiveState:
    """Looks parameters and buffers up where the modules keep them, without walking over the modules each time.

    on_meta: the names of those without memory. Has to be refreshed when one of them is replaced by another tensor.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.refresh()

    def refresh(self) -> None:
        """Find the places again, after modules or parameters were added, removed, sharded or given another dtype."""
        model = self.model
        self._parameters = {name: _place(model, name, own_parameters) for name, _ in model.named_parameters()}
        self._buffers = {name: _place(model, name, own_buffers) for name, _ in model.named_buffers()}
        live, buffers = _read(self._parameters), _read(self._buffers)
        self._parts = {name for name, one in {**live, **buffers}.items() if is_part(one)}
        self._sharded = {
            name: _sharded(name, p) for name, p in live.items() if isinstance(p, DTensor) and name not in self._parts
        }
        self._live_buffers, self._live = buffers, {**live, **{name: one.form for name, one in self._sharded.items()}}
        self._overlaps = overlaps({**live, **buffers})
        self.on_meta = frozenset(n for n, one in {**live, **buffers}.items() if local_rows(one).is_meta)

    def parameters(self) -> dict[str, torch.Tensor]:
        """All parameters, as plain tensors; of one that is laid out over tensor ranks, this rank's part.

        In the place of a sharded one is a tensor on meta of the whole's form.
        """
        return self._of_this_rank(self._live)

    def shards(self) -> dict[str, torch.Tensor]:
        """This rank's rows of the sharded parameters, padded; the parameter's own memory where nothing is missing."""
        return {
            name: pad(one.of, one.rows_in(table[key]))
            for name, one in self._sharded.items()
            for table, key in [self._parameters[name]]
        }

    def buffers(self) -> dict[str, torch.Tensor]:
        """All buffers, as plain tensors; of one that is laid out over tensor ranks, this rank's part."""
        return self._of_this_rank(self._live_buffers)

    def _of_this_rank(self, live: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {**live, **{name: local_part(live[name]) for name in self._parts if name in live}}

    def commit(self, gradients: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor]) -> None:
        """Add gradients to `.grad` and write buffers. The last act of a step; raises as `writes` does."""
        self.writes(gradients, buffers).write()

    def writes(self, gradients: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor]) -> Writes:
        """What a step writes at its end, made ready so that nothing is left that could fail. Without any effect.

        Of a sharded parameter, its padded rows of this rank are given. Raises StateError for a written buffer that is a
        view of other state (programs take the two for independent), and for a `.grad` that the gradient cannot be
        added to.
        """
        for name in buffers:
            if name in self._overlaps:
                raise StateError(
                    f"buffer '{name}' is written in forward and shares memory with '{self._overlaps[name]}'",
                    expected="written buffers with memory of their own",
                    do="register a clone, or make the view in forward",
                )
        with torch.no_grad():
            added = tuple(self._prepared(gradients))
            targets = {name: local_part(self._buffers[name][0][self._buffers[name][1]]) for name in buffers}
            for name, target in targets.items():
                _require_writable(f"buffer '{name}'", target)
            memory = {target.untyped_storage().data_ptr() for target in targets.values()}
            # A new value may be another buffer as it was (a swap, a previous value): kept before that one is written.
            kept = {
                name: value.clone() if value.untyped_storage().data_ptr() in memory else value
                for name, value in buffers.items()
            }
        return Writes(added, tuple((target, kept[name]) for name, target in targets.items()))

    def _prepared(self, gradients: Mapping[str, torch.Tensor]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Each parameter and what its `.grad` grows by, in its dtype and sharded like it."""
        for name, given in gradients.items():
            table, key = self._parameters[name]
            parameter = table[key]
            gradient = given if given.dtype is parameter.dtype else given.to(parameter.dtype)
            if name in self._sharded:
                rows = self._sharded[name].rows_in(parameter).shape[0]
                gradient = sharded_like(gradient.narrow(0, 0, rows), parameter)
            elif name in self._parts:
                gradient = sharded_like(gradient, parameter)
            before = parameter.grad
            if before is not None:
                _require_addable(name, gradient, before)
            yield parameter, gradient

    def require_real(self, used: Collection[str]) -> None:
        """Refuse to run on what has no memory yet."""
        missing = sorted(self.on_meta.intersection(used))
        if missing:
            raise StepError(
                f"'{missing[0]}' is still on the meta device",
                got=f"{len(missing)} parameters and buffers of this rank without memory",
                do="give them values before the first step: step.materialize(), or graphcomp.checkpoint.load_weights",
            )


def _place(model: nn.Module, name: str, table: Any) -> Place:
    path, _, key = name.rpartition(".")
    return table(model.get_submodule(path)), key


def _read(places: Mapping[str, Place]) -> dict[str, torch.Tensor]:
    return {name: table[key] for name, (table, key) in places.items()}


def _sharded(name: str, parameter: DTensor) -> _Sharded:
    mesh, part = parameter.device_mesh, over_tensor_ranks(parameter)
    if mesh.ndim == (1 if part is None else 2):
        data = mesh if part is None else mesh[(mesh.mesh_dim_names or ())[0]]
        if placed_as(parameter) == rows_over(data, part):
            of = Shards(Spec(name, part_shape(parameter), parameter.dtype, mesh.device_type), data.size())
            form = torch.empty(of.spec.shape, dtype=parameter.dtype, device="meta")
            return _Sharded(of, of.rows_of(data.get_local_rank()), form)
    raise StateError(
        f"parameter '{name}' is a DTensor of a kind that a step cannot use",
        expected="rows split over the data ranks: (Shard(dim=0),) over one axis, or of parts over tensor ranks",
        got=f"{parameter.placements} over {mesh}",
        do="leave sharding to the plan",
    )


def _split(tensor: torch.Tensor) -> object:
    """What two tensors must have in common so that one can be added to the other, rank by rank."""
    over = (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None
    return tuple(tensor.shape), over


def _require_addable(name: str, gradient: torch.Tensor, before: torch.Tensor) -> None:
    """Raise StateError where a gradient cannot be added to what a parameter's `.grad` holds."""
    if _split(before) != _split(gradient):
        raise StateError(
            f"the gradient of parameter '{name}' cannot be added to what its .grad holds",
            expected=f"None, or {_form(gradient)}",
            got=_form(before),
            do="call zero_grad() before the step, or keep the gradients that earlier steps wrote",
        )
    _require_writable(f"the gradient of parameter '{name}'", local_rows(before))


def _require_writable(what: str, tensor: torch.Tensor) -> None:
    """Raise StateError for what torch does not write into."""
    repeated = tensor.layout is torch.strided and any(
        size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    if repeated or tensor.is_inference() or tensor.layout is not torch.strided:
        kind = "an expanded view" if repeated else "made in inference mode" if tensor.is_inference() else tensor.layout
        raise StateError(
            f"{what} cannot be written in place",
            expected="a dense tensor with memory of its own",
            got=kind,
            do="call zero_grad(), or replace it by a clone",
        )


def _form(tensor: torch.Tensor) -> str:
    kind = f"a DTensor {tensor.placements}" if isinstance(tensor, DTensor) else "a plain tensor"
    return f"{kind} of shape {tuple(tensor.shape)}"


def overlaps(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Tensors that share memory with another one, by name, with the other's name. Of a sharded one, its rows count."""
    memory: dict[int, list[tuple[int, int, str]]] = {}
    for name, each in tensors.items():
        tensor = local_rows(each)
        if tensor.device.type != "meta" and tensor.numel() and tensor.layout is torch.strided:
            extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            begin = tensor.data_ptr()
            block = memory.setdefault(tensor.untyped_storage().data_ptr(), [])
            block.append((begin, begin + extent * tensor.element_size(), name))
    found: dict[str, str] = {}
    for block in memory.values():
        for begin, end, name in block:
            for other_begin, other_end, other in block:
                if name != other and begin < other_end and other_begin < end:
                    found.setdefault(name, other)
    return found
