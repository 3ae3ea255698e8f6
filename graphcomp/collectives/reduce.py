"""Reductions over ranks."""

from __future__ import annotations

import torch

from graphcomp.collectives.arguments import dense, dimension
from graphcomp.collectives.groups import group_of
from graphcomp.collectives.primitives import reduce_scattered, reduced, scattered, summed
from graphcomp.collectives.reductions import reduction
from graphcomp.errors import CollectiveError


def all_reduce(x: torch.Tensor, group: object, op: object = "sum") -> torch.Tensor:
    """Combine the tensors of all ranks, element by element; every rank gets the result.

    op: "sum"; "avg" (also "mean": the sum divided by the number of ranks, on every backend); "max", "min", "product"
        (also "prod"); or the member of `torch.distributed.ReduceOp` of that name.

    Meaning: partial values in, replicated values out. With L the sum of all ranks' losses, every rank's copy of the
    result contributes to L, so the adjoint of a sum is the sum of the gradients over all ranks: `all_reduce` again.
    The adjoint of "avg" is the average of them. The others have none: a gradient through them is an error.

    The result has the shape of `x`, which must be equal on all ranks, and is dense. Raises CollectiveError.
    """
    x, over = dense(x, "all_reduce", 0), group_of(group, "all_reduce")
    match reduction(op, x, "all_reduce"):
        case "sum":
            return summed(x, over)
        case "avg":
            return summed(x, over) / over.size
        case other:
            return reduced(x, other, over)


def reduce_scatter(x: torch.Tensor, group: object, dim: int = 0, op: object = "sum") -> torch.Tensor:
    """Combine the tensors of all ranks, element by element; rank i gets part i of the result along `dim`.

    op: as in `all_reduce`. The parts are equal: a dimension that the number of ranks does not divide is an error, for
    ranks would run programs of different shapes. Pad it, or use `all_gather_uneven`'s convention.

    Meaning: partial values in, a partition of the reduced values out. Each part exists once, so the adjoint of a sum
    is to gather the parts of the gradient: `all_gather` along `dim`; for "avg" divided by the number of ranks. The
    other reductions have none.

    The result is dense. Raises CollectiveError.
    """
    x, over = dense(x, "reduce_scatter"), group_of(group, "reduce_scatter")
    dim, chosen = dimension(dim, x, "reduce_scatter"), reduction(op, x, "reduce_scatter")
    if x.shape[dim] % over.size:
        raise CollectiveError(
            "a dimension does not divide among the ranks",
            where=f"collectives.reduce_scatter, dim={dim}",
            expected=f"a multiple of {over.size}",
            got=int(x.shape[dim]),
            do="pad the dimension to a multiple of the number of ranks",
        )
    if dim:
        parts = x.unflatten(dim, (over.size, x.shape[dim] // over.size)).unbind(dim)
        x = torch.cat(parts)
    if chosen in ("sum", "avg"):
        part = scattered(x, over)
        return part / over.size if chosen == "avg" else part
    return reduce_scattered(x, chosen, over)
