"""What ranks that would not do the same are told: the first line in which they differ."""

from __future__ import annotations

from collections.abc import Sequence

from graphcomp.errors import AgreementError


def first_difference(mine: Sequence[str], theirs: Sequence[str], end: str = "nothing more") -> tuple[str, str]:
    """The first line in which two texts differ, as each has it; `end` where one has no more lines."""
    place = next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), min(len(mine), len(theirs)))
    own, their = (lines[place].strip() if place < len(lines) else end for lines in (mine, theirs))
    return own, their


def difference(texts: Sequence[str], first: int, other: int) -> AgreementError:
    """The error that shows the first line in which two of these texts differ."""
    own, their = first_difference(texts[first].splitlines(), texts[other].splitlines())
    return AgreementError(
        "the ranks would not do the same",
        where=f"ranks {first} and {other}",
        expected=f"{own} (rank {first})",
        got=f"{their} (rank {other})",
        do="give all ranks the same model, loss function and plan, and those of a pipeline the same microbatches",
    )
