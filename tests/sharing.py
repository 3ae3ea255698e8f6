"""Captures that the tests of one process share, whatever file they are in. Capturing is tested in tests/capture."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

import graphcomp.compiler
from graphcomp.testing.captures import SharedCaptures

captures = SharedCaptures(limit=24)


@contextlib.contextmanager
def shared_captures() -> Iterator[None]:
    """Within, compilers capture equal models once. Not for Inductor, which adds conditions to a capture's sizes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graphcomp.compiler, "capture", captures)
        yield
