"""Every rank sends something to every other."""

from __future__ import annotations

from typing import NamedTuple, overload

import torch

from graphcomp.collectives.arguments import dense, whole
from graphcomp.collectives.groups import Group, group_of
from graphcomp.collectives.primitives import exchanged
from graphcomp.collectives.rows import Numbers, counts_of, host_numbers, pack, row_counts, unpack
from graphcomp.compat.reads import EXCHANGE_SPLITS
from graphcomp.errors import CollectiveError

NAME = "all_to_all"


class Exchange(NamedTuple):
    """What a capacity-bounded `all_to_all` yields.

    rows: `size * capacity` rows: those that arrived, in order of the ranks they come from, then rows of zeros.
    counts: how many rows arrived from each rank: int64, one number a rank.
    overflow: how many of this rank's rows did not fit and were not sent: int64, no dimension. 0 means nothing is lost.
    """

    rows: torch.Tensor
    counts: torch.Tensor
    overflow: torch.Tensor


@overload
def all_to_all(
    x: torch.Tensor,
    group: object,
    output_splits: Numbers | None = None,
    input_splits: Numbers | None = None,
    *,
    capacity: None = None,
) -> torch.Tensor: ...
@overload
def all_to_all(
    x: torch.Tensor,
    group: object,
    output_splits: Numbers | None = None,
    input_splits: Numbers | None = None,
    *,
    capacity: int,
) -> Exchange: ...
def all_to_all(
    x: torch.Tensor,
    group: object,
    output_splits: Numbers | None = None,
    input_splits: Numbers | None = None,
    *,
    capacity: int | None = None,
) -> torch.Tensor | Exchange:
    """Send a run of rows to each rank of the group, and get a run from each, in the order of the group.

    input_splits: how many rows go to each rank, from the first row on. output_splits: how many come from each; None:
        the ranks tell each other, in a small collective of its own. Each is a list or an integer tensor of one number a
        rank; zeros are fine. Both None: equal runs.

    *Equal*: nothing is read on the host. The number of rows must divide among the ranks.

    *Exact* (splits given): returns just the rows that arrive. Lists cost nothing; tensors, and counts that ranks tell
    each other, are read in one host synchronisation a call (see `host_syncs`). In a captured program the number of rows
    is then a size known at run time only, which stays within one stage; rows sent back, with the same two tensors
    swapped, are as many as there were, and nothing is read again.

    *Bounded* (capacity given): at most `capacity` rows go from any rank to any other; nothing is read on the host, and
    the shape of the result does not depend on the splits. Returns an `Exchange`. To send the rows back, call it with
    `input_splits=counts`: `rows` then begins with the rows as they first stood in `x`.

    Meaning: a partition in, another partition of the same rows out; each row exists once. So the adjoint sends each
    row's gradient back: `all_to_all` with the splits swapped. A row that was not sent has gradient zero.

    Results are dense. Raises CollectiveError.
    """
    x, over = dense(x, NAME), group_of(group, NAME)
    if input_splits is None:
        if output_splits is not None or capacity is not None:
            raise _splits_error("input_splits is missing", f"one number for each of {over.size} ranks", "None")
        return _equal(x, over)
    if capacity is not None:
        return _bounded(x, over, output_splits, input_splits, whole("capacity", capacity, 1, None, NAME))
    return _exact(x, over, output_splits, input_splits)


def _equal(x: torch.Tensor, group: Group) -> torch.Tensor:
    if x.shape[0] % group.size:
        do = "give input_splits, or pad the rows to a multiple of the number of ranks"
        raise _splits_error("the rows do not divide among the ranks", f"k * {group.size}", int(x.shape[0]), do)
    return _even(x, x.shape[0] // group.size, group)


def _even(x: torch.Tensor, rows: int, group: Group) -> torch.Tensor:
    return exchanged(x, [rows] * group.size, [rows] * group.size, group)


def _exact(x: torch.Tensor, group: Group, output_splits: Numbers | None, input_splits: Numbers) -> torch.Tensor:
    given = host_numbers("input_splits", input_splits, group.size, None, NAME)
    out = None if output_splits is None else host_numbers("output_splits", output_splits, group.size, None, NAME)
    if given is not None and sum(given) != x.shape[0]:
        raise _splits_error("input_splits do not add up to the rows there are", f"a sum of {x.shape[0]}", given)
    if given is None or out is None:
        sent = counts_of("input_splits", input_splits, group.size, x.device, NAME)
        if output_splits is None:
            received = _even(sent, 1, group)
        else:
            received = counts_of("output_splits", output_splits, group.size, x.device, NAME)
        _, *numbers = EXCHANGE_SPLITS(sent, received, x.shape[0])
        given = numbers[: group.size] if given is None else given
        out = numbers[group.size :] if out is None else out
    return exchanged(x, out, given, group)


def _bounded(
    x: torch.Tensor, group: Group, output_splits: Numbers | None, input_splits: Numbers, capacity: int
) -> Exchange:
    host_numbers("input_splits", input_splits, group.size, None, NAME)
    runs = row_counts("input_splits", input_splits, group.size, x.device, NAME).clamp(min=0)
    sent = runs.clamp(max=capacity)
    if output_splits is None:
        arriving = _even(sent, 1, group)
    else:
        host_numbers("output_splits", output_splits, group.size, None, NAME)
        arriving = row_counts("output_splits", output_splits, group.size, x.device, NAME).clamp(0, capacity)
    blocks = _even(pack(x, runs, capacity), capacity, group)
    return Exchange(unpack(blocks, arriving, capacity, group.size * capacity), arriving, (runs - sent).sum())


def _splits_error(what: str, expected: object, got: object, do: str | None = None) -> CollectiveError:
    return CollectiveError(what, where=f"collectives.{NAME}", expected=expected, got=got, do=do)
