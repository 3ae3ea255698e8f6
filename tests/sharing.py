"""Captures that the tests of one process share, whatever file they are in. Capturing is tested in tests/capture."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

import graphcomp.compiler
from graphcomp.ir.program import Program
from graphcomp.passes.base import Pass
from graphcomp.passes.manager import PassManager, Record
from graphcomp.testing.captures import SharedCaptures

LIMIT = 24

captures = SharedCaptures(LIMIT)


class RunsOnce(PassManager):
    """Passes leave their program as it is, so the same ones over a shared capture yield what they did before."""

    known: dict[tuple[int, tuple[Pass, ...]], tuple[Program, Program, list[Record]]] = {}  # noqa: RUF012

    def run(self, program: Program) -> Program:
        key = id(program), self.passes
        # The given program is kept, or another might come to lie where it lay.
        given, result, self.records = self.known.pop(key, None) or (program, super().run(program), self.records)
        self.known[key] = given, result, self.records
        if len(self.known) > 2 * LIMIT:  # with and without seeds
            del self.known[next(iter(self.known))]
        return result


@contextlib.contextmanager
def shared_captures() -> Iterator[None]:
    """Within, compilers capture equal models once. Not for Inductor, which adds conditions to a capture's sizes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graphcomp.compiler, "capture", captures)
        patch.setattr(graphcomp.compiler, "PassManager", RunsOnce)
        yield
