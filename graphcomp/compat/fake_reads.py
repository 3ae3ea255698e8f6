"""What the operators that read yield of fake tensors: symbols. The public way to make those that no input shows would
let operators through that wait for the device without being counted."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

from graphcomp.compat.believed import believe, hold_by_themselves
from graphcomp.compat.estimates import GUESS, guess
from graphcomp.compat.known_splits import keep, known

Numbers = list[Any]


def read_numbers(numbers: torch.Tensor, sizes: Sequence[Any] = (), relations: str = "") -> Numbers:
    """A symbol for each element, about which the relations hold."""
    return _symbols(int(numbers.numel()), sizes, relations)


def read_sum(numbers: torch.Tensor, sizes: Sequence[Any] = (), relations: str = "") -> Numbers:
    return _symbols(1, sizes, relations)


def _symbols(count: int, sizes: Sequence[Any], relations: str) -> Numbers:
    environment = torch.library.get_ctx()._shape_env
    with hold_by_themselves(environment):
        found = [environment.create_unbacked_symint() for _ in range(count)]
        for number in found:
            guess(number, sizes[0] if sizes else GUESS)
        believe(relations, found, sizes)
    # A number that turns out to be another one already is nobody's to give.
    fresh = environment.pending_fresh_unbacked_symbols
    fresh[:] = [symbol for symbol in fresh if environment.replace(symbol) == symbol]
    return found


def exchange_splits(
    sent: torch.Tensor, received: torch.Tensor, rows: Any, sizes: Sequence[Any] = (), relations: str = ""
) -> Numbers:
    """Symbols, or what is known. The last split is what the others leave, so that sums are the numbers of rows."""
    environment = torch.library.get_ctx()._shape_env
    with hold_by_themselves(environment):
        out = known(received)
        if out is None:
            out = _parts(environment, received, _fresh(environment, rows))
        given = known(sent)
        if given is None or not statically_known_true(sum(given) == rows):
            given = _parts(environment, sent, rows)
        numbers = [sum(out), *given, *out]
        believe(relations, numbers, sizes)
    return numbers


def _parts(environment: Any, splits: torch.Tensor, total: Any) -> Numbers:
    size = int(splits.shape[0])
    nothing = isinstance(total, int) and total == 0  # symbols of one possible value would be gone at once
    parts = [0 if nothing else _fresh(environment, total // size) for _ in range(size - 1)]
    parts.append(total - sum(parts))
    torch._check(parts[-1] >= 0)
    keep(splits, parts)
    return parts


def _fresh(environment: Any, about: Any) -> torch.SymInt:
    """A number from 0 on. about: what it may be in the example, for estimates."""
    number: torch.SymInt = environment.create_unbacked_symint()
    torch._check(number >= 0)
    guess(number, about)
    return number


def unnoted(mode: Any) -> contextlib.AbstractContextManager[None]:
    """Within, new symbols are not expected to be taken note of, as a tracer does."""
    found: contextlib.AbstractContextManager[None] = mode.shape_env.ignore_fresh_unbacked_symbols()
    return found
