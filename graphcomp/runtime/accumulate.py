"""Which result of a call may serve as a gradient accumulator, to be added to in place."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch.multiprocessing.reductions import StorageWeakRef


def storages(values: Sequence[object]) -> dict[int, StorageWeakRef]:
    """The memory behind tensors, by address, held weakly."""
    found: dict[int, StorageWeakRef] = {}
    for value in values:
        if isinstance(value, torch.Tensor):
            storage = value.untyped_storage()
            found[storage.data_ptr()] = StorageWeakRef(storage)
    return found


def shared_results(results: Sequence[object], inputs: dict[int, StorageWeakRef]) -> Collection[int]:
    """The places of results whose memory an input or another result uses too, or that use only a part of
    theirs.

    An input that is gone does not count: its address may be in use again.
    """
    places: dict[int, list[int]] = {}
    shared: set[int] = set()
    for place, result in enumerate(results):
        if isinstance(result, torch.Tensor):
            storage = result.untyped_storage()
            places.setdefault(storage.data_ptr(), []).append(place)
            if storage.nbytes() != result.nbytes:
                shared.add(place)
    for address, users in places.items():
        old = inputs.get(address)
        if len(users) > 1 or (old is not None and not old.expired()):
            shared.update(users)
    return shared


def adopt(
    gradient: torch.Tensor, alone: bool, parameter: torch.Tensor | None, dtype: torch.dtype | None
) -> torch.Tensor:
    """An accumulator that begins as this gradient: the tensor itself if nothing else uses its memory, else
    a copy.

    The strides are those of the parameter, as autograd's own accumulation has it.
    """
    dtype = dtype or gradient.dtype
    strides = gradient.stride() if parameter is None else parameter.stride()
    if alone and gradient.dtype is dtype and gradient.stride() == strides:
        return gradient
    like = gradient if parameter is None else parameter
    return torch.empty_like(like, dtype=dtype, device=gradient.device, requires_grad=False).copy_(gradient)
