"""The error of this package."""

from __future__ import annotations

from graphcomp.errors import GraphcompError


class CollectiveError(GraphcompError):
    """A collective was called in a way that has no meaning: an unknown reduction, a group that is none, splits that do
    not fit, a dimension that does not divide, or a gradient through a reduction that has none.

    Raised before any communication, on every rank that makes the same call.
    """
