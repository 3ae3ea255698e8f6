"""What the tests of whole steps share."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest

import graphcomp.compiler
from graphcomp.capture.batch import batch_key


@pytest.fixture(scope="module")
def one_capture_a_model() -> Iterator[None]:
    """Captures are pure: the same model and kind of batch need be traced only once for all plans of this module."""
    known: dict[object, object] = {}
    original = graphcomp.compiler.capture

    @functools.wraps(original)
    def capture(model: Any, loss_fn: Any, batch: Any, **options: Any) -> Any:
        key = (id(model), batch_key(batch)[0], model.training, tuple(sorted(options.items(), key=str)))
        if key not in known:
            known[key] = original(model, loss_fn, batch, **options), model
        return known[key][0]

    graphcomp.compiler.capture = capture
    yield
    graphcomp.compiler.capture = original
