"""Operators whose number of results depends on contents, while something is captured: that number is read by the
operators that read (`read_sum`, `read_numbers`), and the rest is done by operators that are told it.

    index(x, [mask])    ->    n = read_sum(mask)    i = nonzero_static(mask, n)    index(x, [i])

A program then holds one node for each wait of the host, and backward takes the places that forward has found.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

from graphcomp.capture.indexed import check_broadcasts, check_slice, check_spread, check_squeeze, indexed_shape
from graphcomp.capture.known_contents import Numbers, knowing_contents, once, read
from graphcomp.capture.never_negative import is_never_negative
from graphcomp.compat.believed import rely_on
from graphcomp.compat.fakes import listed_by
from graphcomp.compat.operators import OpOverload
from graphcomp.compat.reads import READ_NUMBERS, READ_SUM
from graphcomp.compat.run_time_sizes import is_run_time
from graphcomp.compat.tracing import node_of
from graphcomp.errors import CaptureError

aten = torch.ops.aten


@contextlib.contextmanager
def contents_read_once() -> Iterator[None]:
    """Within, which is one trace, `RULES` read the same contents once, and `tolist` reads all elements at once."""
    with knowing_contents(), listed_by(_listed):
        yield


def _nonzero(x: torch.Tensor) -> Any:
    """The places of what is true: (n, dimensions)."""
    if x.dim() == 0:
        return NotImplemented
    mask = x if x.dtype is torch.bool else x != 0

    def places() -> torch.Tensor:
        (count,) = read(READ_SUM, mask, [mask.numel()], "0 <= n0\nn0 <= s0")
        return aten.nonzero_static.default(mask, size=count)

    return once("places", mask, places)


def _is_mask(index: object) -> bool:
    return isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8) and index.dim() > 0


def _by_places(x: torch.Tensor, indices: Sequence[Any]) -> list[Any]:
    """Indices with the places of what is true in place of masks."""
    found: list[Any] = []
    for index in indices:
        if not _is_mask(index):
            found.append(index)
            continue
        for size, expected in zip(index.shape, x.shape[len(found) :], strict=False):
            rely_on(size == expected, lambda: "a mask has another shape than what it is an index of", IndexError)
        found += _nonzero(index).unbind(1)
    return found


def _index(target: OpOverload, x: torch.Tensor, indices: Sequence[Any]) -> Any:
    return target(x, _by_places(x, indices)) if any(map(_is_mask, indices)) else NotImplemented


def _index_put(
    target: OpOverload,
    x: torch.Tensor,
    indices: Sequence[Any],
    values: torch.Tensor,
    accumulate: bool = False,
    *rest: Any,
    **options: Any,
) -> Any:
    """Fakes take values of any shape, and compiled code then reads behind their end."""
    masked = any(map(_is_mask, indices))
    if masked and not is_run_time(values) and values.numel() == 1 and not accumulate:
        return NotImplemented  # a fill, whose places nobody has to count
    places = _by_places(x, indices)
    check_broadcasts(values.shape, indexed_shape(x.shape, places))
    return target(x, places, values, accumulate, *rest, **options) if masked else NotImplemented


def _masked_select(input: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """As an index, above autograd: the backward of the operator itself would fix all sizes."""
    shape = torch.broadcast_shapes(input.shape, mask.shape)
    return input.expand(shape)[mask.expand(shape)]


def _narrow(input: torch.Tensor, dim: int, start: Any, length: Any) -> torch.Tensor:
    """Where it begins at a place that is read, a slice: the function itself asks whether it is one from the end."""
    if not is_run_time(start):
        return input.narrow(dim, start, length)
    rely_on(start >= 0)
    rely_on(start + length <= input.shape[dim])
    return aten.slice.Tensor(input, dim, start, start + length)


def _repeats(repeats: torch.Tensor, *, output_size: Any = None) -> Any:
    if output_size is not None:
        return NotImplemented
    (total,) = read(READ_SUM, repeats, [repeats.numel()], "0 <= n0")
    return aten.repeat_interleave.Tensor(repeats, output_size=total)


def _bincount(x: torch.Tensor, weights: torch.Tensor | None = None, minlength: int = 0) -> Any:
    x = x.to(torch.int64)
    last, first = (torch.cat([x, x.new_full((1,), end)]) for end in (minlength - 1, 0))
    relations = f"{minlength} <= n0\n0 <= n1\tno element of what bincount counts is negative"
    classes, _ = read(READ_NUMBERS, torch.stack([last.amax() + 1, first.amin()]), [max(minlength, 16)], relations)
    if weights is None:
        weights = torch.ones_like(x, dtype=torch.int64)
    elif weights.dtype is not torch.float32:
        weights = weights.to(torch.float64)
    return weights.new_zeros(classes).index_add(0, x, weights)


def _unique_consecutive(
    x: torch.Tensor, return_inverse: bool = False, return_counts: bool = False, dim: int | None = None
) -> Any:
    return NotImplemented if dim is not None else _runs(x.reshape(-1), None, x.shape)


def _unique(x: torch.Tensor, sorted: bool = True, return_inverse: bool = False, return_counts: bool = False) -> Any:
    values, order = x.reshape(-1).sort()
    return _runs(values, order, x.shape)


def _runs(values: torch.Tensor, order: torch.Tensor | None, shape: Any) -> tuple[torch.Tensor, ...]:
    """The first element of each run of equal ones; for each element the number of its run; how long each is.

    order: where each element stood before; the second result has them there, in that shape.
    """
    begins = (values != values.roll(1)) | (torch.arange(values.shape[0], device=values.device) == 0)
    numbers = begins.cumsum(0) - 1
    first = _nonzero(begins)[:, 0]
    lengths = torch.zeros_like(first).index_add(0, numbers, torch.ones_like(numbers))
    inverse = numbers if order is None else torch.empty_like(numbers).scatter(0, order, numbers)
    return values[first], inverse.view(shape), lengths


def _item(x: torch.Tensor) -> Any:
    return _plain(x.reshape(1))[0] if _is_whole(x) else NotImplemented


def _is_whole(x: torch.Tensor) -> bool:
    return not (x.dtype is torch.bool or x.is_floating_point() or x.is_complex())


def _plain(x: torch.Tensor) -> Numbers:
    """All elements of a tensor of one dimension."""
    node = node_of(x)
    counts = node is not None and is_never_negative(node)
    return read(READ_NUMBERS, x, (), "\n".join(f"0 <= n{i}" for i in range(x.shape[0])) if counts else "")


def _slice(x: torch.Tensor, dim: int = 0, start: Any = None, end: Any = None, step: Any = 1) -> Any:
    """A place that is read is one from the front; `-n` is one from the back, and not 0: others are other programs."""
    size, places = x.shape[dim], [start, end]
    for which, place in enumerate(places):
        if not is_run_time(place):
            continue
        if statically_known_true(place <= 0) or place.node.expr.as_coeff_Mul()[0].is_negative:
            rely_on(place < 0)
            rely_on(size + place >= 0)
            places[which] = size + place
        else:
            rely_on(place >= 0)
    return NotImplemented if places[0] is start and places[1] is end else aten.slice.Tensor(x, dim, *places, step)


RULES: dict[OpOverload, Callable[..., Any]] = {
    aten.nonzero.default: _nonzero,
    aten.repeat_interleave.Tensor: _repeats,
    aten.bincount.default: _bincount,
    aten._unique2.default: _unique,
    aten.unique_consecutive.default: _unique_consecutive,
    aten._local_scalar_dense.default: _item,
    aten.slice.Tensor: _slice,
    aten.slice_scatter.default: check_slice,
    **{one.correction: check_spread for one in (aten.std, aten.var, aten.std_mean, aten.var_mean)},
    **{getattr(one, form): check_squeeze for one in (aten.squeeze, aten.squeeze_) for form in one.overloads()},
    **{target: functools.partial(_index, target) for target in (aten.index.Tensor, aten._unsafe_index.Tensor)},
    **{
        target: functools.partial(_index_put, target)
        for target in (
            aten.index_put.default,
            aten.index_put_.default,
            aten._index_put_impl_.default,
            aten._unsafe_index_put.default,
        )
    },
}
"""By operator; NotImplemented where it stays as it is."""


FUNCTIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.masked_select: _masked_select,
    torch.Tensor.masked_select: _masked_select,
    torch.narrow: _narrow,
    torch.Tensor.narrow: _narrow,
}
"""What is called in place of functions of torch."""


def _listed(x: torch.Tensor) -> Any:
    """`x.tolist()` of an integer tensor; NotImplemented for others, and where the batch says how many there are."""
    if not _is_whole(x):
        return NotImplemented
    if is_run_time(x.shape):
        raise CaptureError(
            "the code makes a list of a tensor, and how many elements that has is known only when the program runs",
            expected="a number of elements that is the same for all batches",
            got=".tolist() of what x[mask], nonzero, unique or bincount yield, or of what is made of it",
            do="take as many as there can be first, as in torch.bincount(x, minlength=E)[:E].tolist() for E classes; "
            "or keep it a tensor",
        )
    if not all(isinstance(size, int) for size in x.shape):
        return NotImplemented
    numbers = _plain(x.reshape(-1)) if x.numel() else []
    for size in reversed(x.shape[1:]):
        numbers = [numbers[i : i + size] for i in range(0, len(numbers), size)] if size else [[]] * x.shape[0]
    return numbers if x.dim() else numbers[0]
