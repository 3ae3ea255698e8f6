"""Runs programs operation by operation, bitwise as eager PyTorch does."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from graphcomp.backend.base import Compiled, Listener, Progress
from graphcomp.ir.interp import boxed_callable
from graphcomp.ir.program import Program
from graphcomp.partition.accumulating import in_place


@dataclass
class EagerBackend:
    """Every program becomes straight-line Python over torch operations."""

    listener: Listener | None = None
    programs: int = 0
    reused: int = 0
    name = "eager"

    def pack(self, environment: object) -> tuple[object, ...]:
        return ()  # made in no time

    def adopt(self, packed: tuple[object, ...], environment: object) -> None:
        pass

    def compile(self, program: Program, groups: Mapping[str, str] | None = None) -> Compiled:
        begin = time.perf_counter()
        call = boxed_callable(in_place(program), groups or {})
        self.programs += 1
        seconds = time.perf_counter() - begin
        if self.listener is not None:
            self.listener(Progress(program.name, "compiled", seconds))
        return Compiled(call, seconds=seconds)
