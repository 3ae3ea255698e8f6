"""Matrices of tests of which `make test` runs a diagonal, and `make test-wide` all."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest


def diagonal(*axes: Sequence[Any], step: int | None = None) -> list[Any]:
    """All combinations as parameters; those off a diagonal are marked wide.

    On it are those whose places on the axes add up to a multiple of `step`. None: as many as the last axis has, so that
    each choice from the other axes is on it once, with one value of the last.
    """
    step = step or len(axes[-1])
    found = []
    for places in itertools.product(*(range(len(axis)) for axis in axes)):
        values = [axis[place] for axis, place in zip(axes, places, strict=True)]
        found.append(pytest.param(*values, marks=[pytest.mark.wide] if sum(places) % step else []))
    return found
