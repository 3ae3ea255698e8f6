"""Which operations treat each row of a matrix by itself, and how one works on some of the rows only.

A value "with rows" has one row for each element of its first `lead` dimensions; of some of the rows it is held flat, as
[rows, ...]. So merging and splitting leading dimensions is nothing, and dimensions behind them move by lead - 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from torch.fx import Node


@dataclass(frozen=True)
class Rows:
    """space: how many selections of rows lie between it and the head's rows. zero: the rows that later selections leave
    out are zero. turned: a matrix whose columns are the rows."""

    lead: int
    space: int
    zero: bool = False
    turned: bool = False


@dataclass(frozen=True)
class Total:
    """A sum over all rows of a value of this kind."""

    of: Rows


State = Rows | Total | tuple[Any, ...]


@dataclass(frozen=True)
class Selection:
    """A slice that leaves out rows. before, after: the leading dimensions."""

    arguments: tuple[Any, ...]
    before: tuple[Any, ...]
    after: tuple[Any, ...]


@dataclass(frozen=True)
class Piece:
    """The rows of a value from elsewhere. lead: the dimensions its own first ones are expanded to, to make its rows."""

    node: Node
    lead: tuple[Any, ...] = field(compare=False)
    space: int
    own: int
    turned: bool = False


class Mark(Enum):
    LENGTH = "the number of rows at hand"


@dataclass(frozen=True)
class Step:
    """How a node is computed of some of the rows: nodes among the arguments that have a state stand for their own rows.

    target None: it is its first argument.
    """

    state: State
    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)


class Mixes(Exception):
    """An operation needs more than one row at a time; the text says how."""
