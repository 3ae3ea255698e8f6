"""The collectives as the backend has them, over dimension 0 of dense tensors, each with its wait and its adjoint.

All that a caller may ask for besides (other dimensions, orders, averages) is made of these and of tensor operations.
Nothing depends on this process's own rank, so that a graph reads the same on every rank of the group.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence

import torch

from graphcomp.collectives.groups import Group
from graphcomp.collectives.linear import linear
from graphcomp.collectives.reductions import Reduction
from graphcomp.compat import collective_operators as ops
from graphcomp.errors import CollectiveError

Sizes = Sequence[int]


def summed(x: torch.Tensor, group: Group) -> torch.Tensor:
    """The sum over all ranks, on all ranks. Its adjoint is itself."""
    return linear(x, lambda x: _all_reduce(x, "sum", group), lambda g: summed(g, group))


def reduced(x: torch.Tensor, op: Reduction, group: Group) -> torch.Tensor:
    """A reduction over all ranks that has no adjoint here: the gradient does not follow from gradients alone."""
    return linear(x, lambda x: _all_reduce(x, op, group), _without_adjoint("all_reduce", op))


def gathered(x: torch.Tensor, group: Group) -> torch.Tensor:
    """The rows of all ranks, one rank behind the other. Adjoint: `scattered`."""
    return linear(
        x,
        lambda x: ops.WAIT(ops.ALL_GATHER(x.contiguous(), group.size, group.name)),
        lambda g: scattered(g, group),
    )


def scattered(x: torch.Tensor, group: Group) -> torch.Tensor:
    """This rank's equal part of the rows of the sum over all ranks. Adjoint: `gathered`."""
    return linear(x, lambda x: _reduce_scatter(x, "sum", group), lambda g: gathered(g, group))


def reduce_scattered(x: torch.Tensor, op: Reduction, group: Group) -> torch.Tensor:
    """This rank's equal part of the rows of a reduction that has no adjoint here."""
    return linear(x, lambda x: _reduce_scatter(x, op, group), _without_adjoint("reduce_scatter", op))


def exchanged(x: torch.Tensor, output_splits: Sizes, input_splits: Sizes, group: Group) -> torch.Tensor:
    """Runs of rows, one for each rank, against one run from each rank. Adjoint: the same with the splits swapped."""
    out, given = list(output_splits), list(input_splits)
    return linear(
        x,
        lambda x: ops.WAIT(ops.ALL_TO_ALL(x.contiguous(), out, given, group.name)),
        lambda g: exchanged(g, given, out, group),
    )


def sent_from(x: torch.Tensor, src: int, group: Group) -> torch.Tensor:
    """The tensor of rank `src` of the group, on all ranks. Adjoint: `sent_to`."""
    return linear(
        x,
        lambda x: ops.WAIT(ops.BROADCAST(x.contiguous(), src, group.name)),
        lambda g: sent_to(g, src, group),
    )


def sent_to(x: torch.Tensor, src: int, group: Group) -> torch.Tensor:
    """The sum over all ranks on rank `src` of the group, zeros on the others. Adjoint: `sent_from`."""
    return torch.where(_is_rank(src, group, x.device), summed(x, group), 0)


def _is_rank(src: int, group: Group, device: torch.device) -> torch.Tensor:
    """True on rank `src` of the group, without asking which rank this is: all ranks send the same table of who."""
    table = (torch.arange(group.size, device=device) == src).to(torch.uint8)
    ones = [1] * group.size
    return exchanged(table, ones, ones, group)[0].to(torch.bool)


def _all_reduce(x: torch.Tensor, op: str, group: Group) -> torch.Tensor:
    result: torch.Tensor = ops.WAIT(ops.ALL_REDUCE(x.contiguous(), op, group.name))
    return result


def _reduce_scatter(x: torch.Tensor, op: str, group: Group) -> torch.Tensor:
    result: torch.Tensor = ops.WAIT(ops.REDUCE_SCATTER(x.contiguous(), op, group.size, group.name))
    return result


def _without_adjoint(collective: str, op: Reduction) -> functools.partial[torch.Tensor]:
    return functools.partial(_refuse, error=_no_adjoint(collective, op, _caller()))


def _refuse(gradient: torch.Tensor, error: CollectiveError) -> torch.Tensor:
    raise error


def _no_adjoint(collective: str, op: Reduction, line: str) -> CollectiveError:
    return CollectiveError(
        f"{collective} with op={op!r} has no gradient here, but one is needed",
        where=line,
        expected="op='sum' or op='avg' wherever a gradient has to pass",
        got=f"op={op!r}",
        do="give it x.detach() if no gradient is to pass (a running maximum, a statistic)",
    )


def _caller() -> str:
    """The line that called into this package; a backward has no other way to name it."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__package__") == __package__:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
