"""Relations between numbers that are read and sizes that the reading operator is given, as the text that programs hold.

One a line: the relation, in Python, over the numbers (`n0`, `n1`, ...) and the sizes (`s0`, ...); how it reads to the
user; the line of code that needs it. The latter two may be left out where the operator's own meaning implies it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from graphcomp.compat.host_functions import function_of
from graphcomp.errors import GuardError


class Relation(NamedTuple):
    holds: str
    readable: str = ""
    line: str = ""

    def __str__(self) -> str:
        return "\t".join(self)


def parsed(relations: str) -> Iterator[Relation]:
    for line in relations.splitlines():
        yield Relation(*line.split("\t"))


def named(numbers: Sequence[Any], sizes: Sequence[Any]) -> dict[str, Any]:
    """The numbers and the sizes by the names that they have in a relation."""
    return {f"n{i}": n for i, n in enumerate(numbers)} | {f"s{i}": size for i, size in enumerate(sizes)}


def check(relations: str, numbers: list[Any], sizes: Sequence[int]) -> list[Any]:
    """The numbers, as they are. Raises GuardError where a relation does not hold."""
    names = named(numbers, sizes)
    for holds, readable, line in parsed(relations):
        if not function_of(holds, tuple(names))(*names.values()):
            used = re.findall(r"\w+", holds)
            raise GuardError(
                "sizes that are known when the program runs do not fit together",
                where=line or None,
                expected=readable or holds,
                got=", ".join(f"{name} = {number}" for name, number in names.items() if name in used),
                do=_NOT_ONE if "!= 1" in holds else _FITS,
            )
    return numbers


_FITS = (
    "see what the code at this line needs; eager PyTorch fails there too, unless it broadcasts one row"
    ", or counts a negative place from the end"
)
_NOT_ONE = (
    "eager PyTorch drops a dimension of one row there (name another one, as in .squeeze(1), or use .flatten()), or its "
    "gradient of std and var is nan (give correction=0)"
)
