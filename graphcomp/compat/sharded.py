"""Parameters that become sharded in place. Python gives no object a class with other slots, and `DTensor` has slots.

So `torch.utils.swap_tensors` refuses to make a parameter a `DTensor`; here is a class that it accepts. The fields and
the constructor of `DTensor`, and how often a tensor is used, have no public names.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.optim.optimizer import _foreach_supported_types as _optimizer_types
from torch.utils._foreach_utils import _foreach_supported_types as _other_types
from torch.utils._pytree import tree_leaves

from graphcomp.compat.blocks import block_of, placed_as, rows_over
from graphcomp.errors import StateError

FIELDS = ("_local_tensor", "_spec")
"""What a `DTensor` keeps in its slots."""


class SlotlessDTensor(torch.Tensor):
    """A `DTensor` in all but its memory layout: the same fields, in the object's dictionary, and the same methods.

    Every operator runs as `DTensor`'s own, on the same memory, and returns a `DTensor`. In two places it takes more
    than that does: `copy_` from a whole tensor of its shape takes this rank's rows, and so does assigning to `.data`.
    """

    _local_tensor: torch.Tensor
    _spec: Any

    __torch_function__ = DTensor.__torch_function__  # none: operators only
    __repr__ = DTensor.__repr__  # type: ignore[assignment]
    __create_write_items__ = DTensor.__create_write_items__  # of distributed checkpoints
    __create_chunk_list__ = DTensor.__create_chunk_list__
    __get_tensor_shard__ = DTensor.__get_tensor_shard__
    to_local = DTensor.to_local
    full_tensor = DTensor.full_tensor
    redistribute = DTensor.redistribute
    device_mesh = DTensor.device_mesh
    placements = DTensor.placements
    _raise_if_contains_partial_placements = DTensor._raise_if_contains_partial_placements

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if get_proxy_mode() is not None:
            _refuse_to_be_traced(args)
        if func is torch.ops.aten.copy_.default and type(args[0]) is cls:
            args = (args[0], rows_like(args[0], args[1]), *args[2:])
        return DTensor.__torch_dispatch__(func, types, args, kwargs or {})

    @property
    def data(self) -> Any:
        """A DTensor of the same memory. Assigned: a DTensor split alike, or a whole tensor, whose rows are copied."""
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        rows = rows_like(self, value)
        if not isinstance(rows, DTensor) or _kind(rows) != _kind(self):
            raise StateError(
                "the .data of a sharded parameter was assigned something else than its values",
                expected=f"{_form(self)}, whole or sharded alike",
                got=_form(value),
                do="assign values of the same shape and dtype; to change the dtype call .to(dtype) on its module",
            )
        self._local_tensor = local_rows(rows) if rows is value else local_rows(rows).clone()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy is a new object, so it can be a real DTensor."""
        if id(self) not in memo:
            copied = self._real(self._local_tensor.clone())
            memo[id(self)] = copied
            copied.grad = copy.deepcopy(self.grad, memo)
            vars(copied).update(copy.deepcopy(_attributes(self), memo))
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        real = self._real(self._local_tensor)
        vars(real).update(_attributes(self))
        return real.__reduce_ex__(protocol)

    def _real(self, local: torch.Tensor) -> nn.Parameter:
        return nn.Parameter(sharded_like(local, self), self.requires_grad)


class ShardedParameter(SlotlessDTensor):
    """What a parameter becomes: `isinstance` takes it for a `DTensor`, and for a `Parameter`."""

    @property
    def __class__(self) -> Any:
        return DTensor

    @__class__.setter
    def __class__(self, kind: type) -> None:
        """Exchanging contents with a DTensor (as `module.to(dtype)` does) exchanges the fields; the class stays."""
        if kind is not DTensor:
            object.__dict__["__class__"].__set__(self, kind)


def shard_in_place(
    parameter: nn.Parameter, local: torch.Tensor, mesh: DeviceMesh, gradient: torch.Tensor | None
) -> None:
    """Split a parameter's rows over a mesh of one axis; of one that is laid out over tensor ranks, those of each part.
    It stays the same object.

    local, gradient: this rank's rows. The parameter must be swappable, or torch raises a RuntimeError.
    """
    placed = rows_over(mesh, placed_as(parameter))
    spec = _dtensor(local, parameter, placed.mesh, placed.placements)._spec
    kind = DTensor if isinstance(parameter, DTensor) else SlotlessDTensor
    new = torch.Tensor._dtensor__new__(kind, local, spec, requires_grad=parameter.requires_grad)
    if gradient is not None:
        new.grad = DTensor(gradient, spec, requires_grad=False)
    vars(new).update(vars(parameter), _is_param=True)
    torch.utils.swap_tensors(parameter, new)
    if kind is DTensor:
        return
    parameter.__class__ = ShardedParameter  # type: ignore[assignment]
    for types in (_optimizer_types, _other_types):  # as DTensor itself does, or optimizers go one by one on CUDA
        if ShardedParameter not in types:
            types.append(ShardedParameter)


def local_rows(tensor: torch.Tensor) -> torch.Tensor:
    """The memory that this rank holds of a DTensor, as it is; a plain tensor itself."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def sharded_like(local: torch.Tensor, like: Any) -> torch.Tensor:
    """A DTensor of this memory, of the shape and placements of another one."""
    if local.dtype == like.dtype:
        return DTensor(local, like._spec, requires_grad=False)
    return _dtensor(local, like, like.device_mesh, like.placements)


def rows_like(target: Any, source: Any) -> Any:
    """This rank's block of a whole tensor of the target's shape, as a DTensor like it; anything else as it is."""
    whole = isinstance(source, torch.Tensor) and not isinstance(source, DTensor) and source.shape == target.shape
    if not whole:
        return source
    return _dtensor(source.detach()[block_of(target)], target, target.device_mesh, target.placements)


def hindrance(parameter: torch.Tensor) -> str | None:
    """Why a parameter cannot be swapped, in words: who else in this process refers to it."""
    if weakref.getweakrefs(parameter):
        return "something holds a weak reference to it"
    count = parameter._use_count()  # type: ignore[attr-defined]
    if count == 2 and parameter.requires_grad:
        # The end of an older graph may refer to it: a backward through that graph raises from then on.
        node = torch.autograd.graph.get_gradient_edge(parameter).node
        count = parameter._use_count() - 1  # type: ignore[attr-defined]
        del node
    return None if count == 1 else "an autograd graph, or another part of torch, still uses it"


@contextmanager
def recurrent_lists_renewed(model: nn.Module) -> Iterator[None]:
    """Recurrent layers keep weak references to their weights. Within they do not; afterwards they have them again."""
    layers = [module for module in model.modules() if isinstance(module, nn.RNNBase)]
    layers = [layer for layer in layers if not all(isinstance(weight, DTensor) for weight in layer._flat_weights)]
    kinds = [list(map(type, layer._flat_weights)) for layer in layers]
    for layer in layers:
        layer._flat_weight_refs = []
    try:
        yield
    finally:
        for layer, before in zip(layers, kinds, strict=True):
            if list(map(type, layer._flat_weights)) != before:
                layer._init_flat_weights()
            else:  # nothing has happened to them
                layer._flat_weight_refs = [None if w is None else weakref.ref(w) for w in layer._flat_weights]


def _dtensor(local: torch.Tensor, whole: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Any]) -> DTensor:
    shape, stride = whole.shape, whole.stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


def _refuse_to_be_traced(args: Any) -> None:
    """A program has whole parameters as inputs, but only where the code reads them from the model."""
    found = next((leaf for leaf in tree_leaves(args) if isinstance(leaf, ShardedParameter)), None)
    raise StateError(
        "the code uses a sharded parameter that it does not read as an attribute of the model",
        expected="self.weight in a forward, or model.layer.weight in the loss function",
        got="one held by a plain list or dict, a closure or a global" + ("" if found is None else f": {_form(found)}"),
        do="read it from its module where it is used",
    )


def _attributes(tensor: torch.Tensor) -> dict[str, Any]:
    """What a user has set on a parameter."""
    return {key: value for key, value in vars(tensor).items() if key not in (*FIELDS, "_is_param")}


def _kind(tensor: Any) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.device_mesh, tensor.placements


def _form(tensor: torch.Tensor) -> str:
    kind = "DTensor" if isinstance(tensor, DTensor) else "tensor"
    return f"a {str(tensor.dtype).removeprefix('torch.')} {kind} of shape {tuple(tensor.shape)}"
