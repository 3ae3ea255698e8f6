"""What ranks that would not do the same are told: the first line in which they differ."""

from __future__ import annotations

from collections.abc import Sequence

from graphcomp.errors import AgreementError


def difference(texts: Sequence[str], first: int, other: int) -> AgreementError:
    """The error that shows the first line in which two of these texts differ."""
    mine, theirs = texts[first].splitlines(), texts[other].splitlines()
    place = next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), min(len(mine), len(theirs)))
    own, their = (lines[place].strip() if place < len(lines) else "nothing more" for lines in (mine, theirs))
    return AgreementError(
        "the ranks would not do the same",
        where=f"ranks {first} and {other}",
        expected=f"{own} (rank {first})",
        got=f"{their} (rank {other})",
        do="give all ranks the same model, loss function and plan, and those of a pipeline the same microbatches",
    )
