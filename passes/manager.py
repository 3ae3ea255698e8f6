"""Runs a pipeline of passes: checks it as a whole first, verifies between passes, keeps who did what."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from graphcomp.errors import PlanError
from graphcomp.ir.printer import print_program
from graphcomp.ir.program import Level, Program
from graphcomp.ir.verify import verify
from graphcomp.passes.base import Pass
from graphcomp.passes.pipeline import pipeline_text


@dataclass(frozen=True)
class Record:
    """What one pass did. made_by: the pass with its options; text: the program afterwards, if asked for."""

    made_by: str
    seconds: float
    nodes_before: int
    nodes_after: int
    text: str | None = None

    def __str__(self) -> str:
        head = f"{self.made_by}: {self.nodes_before} -> {self.nodes_after} nodes, {self.seconds:.3f} s"
        return f"# {head}\n{self.text}" if self.text is not None else head


class PassManager:
    """A checked pipeline.

    given: properties that the program has before the first pass.
    keep_text: keep the program's text after each pass in the records (for dumps; costs a print a pass).
    Raises PlanError at once, before anything runs, if the passes do not fit each other.
    """

    def __init__(self, passes: Sequence[Pass], *, given: Iterable[str] = (), keep_text: bool = False) -> None:
        self.passes = tuple(passes)
        self.keep_text = keep_text
        self.records: list[Record] = []
        _check(self.passes, frozenset(given))

    def run(self, program: Program) -> Program:
        """The program after all passes; `program` itself is left as it is. `records` tells about this run."""
        for step in self.passes:
            if program.level not in step.levels:
                raise _level_error(step, program.level, f"program '{program.name}'")
        self.records = []
        if not self.passes or self.passes[0].verifies_input:
            verify(program, made_by="the input of the pipeline")
        program = program.copy()
        for step in self.passes:
            before, started = len(program.calls()), time.perf_counter()
            program = step.apply(program)
            seconds = time.perf_counter() - started
            verify(program, made_by=str(step))
            text = print_program(program) if self.keep_text else None
            self.records.append(Record(str(step), seconds, before, len(program.calls()), text))
        return program

    def dump(self) -> str:
        """What the last run did, one pass after the other."""
        return "\n".join(map(str, self.records))

    def __str__(self) -> str:
        return pipeline_text(self.passes)


def _level_error(step: Pass, level: Level, where: str) -> PlanError:
    levels = ", ".join(sorted(step.levels))
    return PlanError(f"pass '{step}' does not apply at level {level}", where=where, expected=levels, got=level)


def _check(passes: Sequence[Pass], given: frozenset[str]) -> None:
    """Requirements, conflicts and levels of the whole pipeline, on paper."""
    provider = dict.fromkeys(sorted(given), "the program itself")
    for place, step in enumerate(passes):
        for missing in sorted(step.requires - provider.keys()):
            later = next((str(other) for other in passes[place:] if missing in other.provides), None)
            raise PlanError(
                f"pass '{step}' requires '{missing}', which nothing before it provides",
                where=f"pass {place + 1} of {pipeline_text(passes)}",
                got=f"'{later}' provides it, but comes later" if later else "no pass of the pipeline provides it",
                do=f"move '{later}' before '{step}'" if later else f"add a pass that provides '{missing}'",
            )
        for clash in sorted(step.conflicts & provider.keys()):
            raise PlanError(
                f"pass '{step}' cannot run after '{provider[clash]}', which provides '{clash}'",
                where=f"pass {place + 1} of {pipeline_text(passes)}",
                do="change their order, or leave one of them out",
            )
        provider |= dict.fromkeys(step.provides, str(step))
    common = frozenset(Level)
    for place, step in enumerate(passes):
        if not common & step.levels:
            other = next(before for before in passes[:place] if not before.levels & step.levels)
            raise PlanError(
                f"passes '{other}' and '{step}' apply at different levels",
                expected=f"{', '.join(sorted(other.levels))} for '{other}'",
                got=f"{', '.join(sorted(step.levels))} for '{step}'",
                do="run them in two pipelines, each on programs of its level",
            )
        common &= step.levels
