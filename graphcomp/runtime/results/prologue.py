"""What the losses of a step are divided by: counted over all microbatches before anything else runs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from graphcomp.capture.joint import LossSpec


@dataclass(frozen=True)
class Counts:
    """tokens: what was counted, by loss name; for a mean loss the number of microbatches. int64, or float64
    for float weights; 0-dim, on the device. denominators: the same with 0 replaced by 1, so that a step
    without tokens has loss 0.
    """

    tokens: Mapping[str, torch.Tensor]
    denominators: Mapping[str, torch.Tensor]


def count(
    losses: Sequence[LossSpec],
    counted: Sequence[Mapping[str, torch.Tensor]],
    device: torch.device | str = "cpu",
    floating: Collection[str] | None = None,
    reduce: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> Counts:
    """Add up the token counts of a step, in 64 bits, on the device, without reading them.

    losses: all named losses, in an order that data ranks agree on. counted: what the prologue gave for each
    microbatch, by loss name; a missing name counts zero. floating: the losses whose counts are float
    weights (data ranks have to agree); None: as they come. reduce: a vector added up over the
    data ranks; called once for the integers and once for the floats, if there are any.
    """
    if floating is None:
        floating = {name for one in counted for name, value in one.items() if value.dtype.is_floating_point}
    whole = [loss for loss in losses if loss.kind == "mean" or loss.name not in floating]
    vectors = []
    for members, dtype in (
        (whole, torch.int64),
        ([one for one in losses if one not in whole], torch.float64),
    ):
        if members:
            vector = torch.stack([_sum(loss, counted, dtype, device) for loss in members])
            if reduce is not None:
                vector = reduce(vector)
            vectors.append((members, vector))
    tokens: dict[str, torch.Tensor] = {}
    denominators: dict[str, torch.Tensor] = {}
    for members, vector in vectors:
        guarded = never_zero(vector)
        names = [loss.name for loss in members]
        tokens |= zip(names, vector.unbind(), strict=True)
        denominators |= zip(names, guarded.unbind(), strict=True)
    return Counts({one.name: tokens[one.name] for one in losses}, {one.name: denominators[one.name] for one in losses})


def never_zero(counts: torch.Tensor) -> torch.Tensor:
    """With 1 in the place of 0."""
    return torch.where(counts == 0, torch.ones_like(counts), counts)


def _sum(
    loss: LossSpec,
    counted: Sequence[Mapping[str, torch.Tensor]],
    dtype: torch.dtype,
    device: torch.device | str,
) -> torch.Tensor:
    if loss.kind == "mean":
        return torch.full((), len(counted), dtype=dtype, device=device)
    values = [one[loss.name] for one in counted if loss.name in one]
    if not values:
        return torch.zeros((), dtype=dtype, device=device)
    if len({value.dtype for value in values}) > 1:
        values = [value.to(dtype) for value in values]
    return torch.stack(values).to(dtype).sum()
