"""Captures are the slow part of these tests, and pure: one of them serves all plans of a module's tests."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest

import graphcomp.compiler
from graphcomp.capture.batch import batch_key


@pytest.fixture(scope="module")
def one_capture_a_model() -> Iterator[None]:
    """For tests whose models stay as they are: the same model and kind of batch are traced once."""
    known: dict[Any, Any] = {}
    original = graphcomp.compiler.capture

    @functools.wraps(original)
    def capture(model: Any, loss_fn: Any, batch: Any, **options: Any) -> Any:
        key = (id(model), loss_fn, batch_key(batch)[0], model.training, tuple(sorted(options.items(), key=str)))
        if key not in known:
            known[key] = original(model, loss_fn, batch, **options), model
        return known[key][0]

    graphcomp.compiler.capture = capture
    yield
    graphcomp.compiler.capture = original
