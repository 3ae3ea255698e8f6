"""Gathering and handing out what ranks hold."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from graphcomp.collectives.arguments import dense, dimension, whole
from graphcomp.collectives.groups import Group, group_of
from graphcomp.collectives.primitives import gathered, sent_from
from graphcomp.collectives.rows import host_numbers, pack, row_counts, unpack
from graphcomp.errors import CollectiveError


def all_gather(x: torch.Tensor, group: object, dim: int = 0, *, ranks: Sequence[int] | None = None) -> torch.Tensor:
    """Put the tensors of the group's ranks one behind the other along `dim`; every rank gets all of it.

    ranks: which ranks of the group (counted within it) and in which order; None: all of them in order. Each at most
        once. All ranks take part whatever is chosen, and all parts are moved.

    Meaning: a partition in, replicated values out. With L the sum of all ranks' losses, every rank's copy contributes
    to L, so the adjoint sums the copies' gradients over ranks and hands each rank its part: `reduce_scatter(op="sum")`
    along `dim`. The gradient of a rank that was not chosen is zero.

    The shape of `x` must be equal on all ranks; a tensor of no dimension counts as one row. The result is dense.
    Raises CollectiveError.
    """
    x, over = dense(x, "all_gather", 0), group_of(group, "all_gather")
    x = x if x.dim() else x.reshape(1)
    dim = dimension(dim, x, "all_gather")
    order = list(range(over.size)) if ranks is None else _order(ranks, over)
    rows = gathered(x, over)
    if dim == 0 and order == list(range(over.size)):
        return rows
    parts = rows.unflatten(0, (over.size, x.shape[0])).unbind(0)
    return torch.cat([parts[rank] for rank in order], dim)


def all_gather_uneven(
    x: torch.Tensor, group: object, counts: torch.Tensor | Sequence[int], maximum: int
) -> torch.Tensor:
    """Put the first rows of each rank's tensor one rank behind the other; how many rows is known at run time only.

    counts: how many rows each rank of the group gives, the same on all ranks: an integer tensor, which is never read
        on the host, or a list. Zeros are fine. maximum: no rank gives more; larger counts are cut.

    Returns `len(counts) * maximum` rows: first the `counts.sum()` rows that were given, then rows of zeros. So its
    shape does not depend on the counts, nothing waits for the device, and no program is compiled anew for them.

    `x` has at most `maximum` rows, of which this rank gives the first; rows that it promises and does not have count
    as zeros. Its other dimensions are equal on all ranks.

    Meaning, and so the adjoint, as for `all_gather`: the gradients of a row are summed over all ranks and handed to
    the rank that gave it; rows that nobody gave have none. Forward and backward move the same number of bytes, that of
    `maximum` rows a rank. Raises CollectiveError.
    """
    x, over = dense(x, "all_gather_uneven"), group_of(group, "all_gather_uneven")
    whole("maximum", maximum, 1, None, "all_gather_uneven")
    if x.shape[0] > maximum:
        raise CollectiveError(
            "a rank has more rows than the declared maximum",
            where="collectives.all_gather_uneven",
            expected=f"at most {maximum} rows",
            got=int(x.shape[0]),
            do="raise `maximum`, or give fewer rows",
        )
    host_numbers("counts", counts, over.size, maximum, "all_gather_uneven")
    runs = row_counts("counts", counts, over.size, x.device, "all_gather_uneven").clamp(0, maximum)
    if not isinstance(x.shape[0], int) or x.shape[0] < maximum:
        own = torch.full((1,), maximum, dtype=torch.int64, device=x.device)
        x = pack(x, own, maximum)
    return unpack(gathered(x, over), runs, maximum, over.size * maximum)


def broadcast(x: torch.Tensor, group: object, src: int = 0) -> torch.Tensor:
    """The tensor of one rank, on all ranks.

    src: the rank that gives it, counted within the group. The others' `x` says only what shape and dtype it has.

    Meaning: one rank's value in, replicated values out. Every rank's copy contributes to the sum of all ranks' losses,
    so the adjoint is the sum of the gradients over all ranks on rank `src`, and zero on the others. It moves twice
    what the forward does (an all-reduce, for there is no functional reduce) and a few bytes that tell ranks apart.

    The result is dense. Raises CollectiveError.
    """
    x, over = dense(x, "broadcast", 0), group_of(group, "broadcast")
    return sent_from(x, whole("src", src, 0, over.size - 1, "broadcast"), over)


def _order(ranks: Sequence[int], group: Group) -> list[int]:
    order = [whole("ranks", rank, 0, group.size - 1, "all_gather") for rank in ranks]
    if not order or len(set(order)) < len(order):
        raise CollectiveError(
            "the ranks to gather from are chosen at least one, each at most once",
            where="collectives.all_gather",
            expected=f"some of 0 to {group.size - 1}, in any order",
            got=f"ranks={order}",
        )
    return order
