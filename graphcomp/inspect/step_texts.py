"""Collects the texts of a compiled step for a dump."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from graphcomp.dataparallel.step import DataParallel
from graphcomp.inspect.dump import Text, dump
from graphcomp.partition.stages import Partitioned
from graphcomp.passes.manager import Record
from graphcomp.runtime.program.step_calls import step_programs

if TYPE_CHECKING:
    from graphcomp.compiler import GraphCompiler, RankPrograms, Specialisation


def dump_step(
    folder: str | os.PathLike[str],
    compiler: GraphCompiler,
    programs: RankPrograms,
    plan_text: str,
    data: DataParallel | None = None,
) -> list[Path]:
    """Write the plan, each specialisation's joint program, passes and stage programs, the step programs, the schedule
    and the rank programs into `folder`; see `dump`. Returns the paths.

    plan_text: what `explain` says. data: what the step does over data ranks, if there are several.
    """
    texts = [Text("plan", plan_text)]
    for one in compiler.specialisations:
        texts += _specialisation(one, "" if len(compiler.specialisations) == 1 else f"program {one.number} ")
    if data is not None:
        stages = range(programs.schedule.stages)
        texts += [Text(program.name, str(program)) for program in step_programs(data, stages)]
    texts.append(Text("schedule", programs.schedule.text()))
    texts += [Text(f"rank {program.rank}", str(program)) for program in programs.ranks]
    return dump(folder, texts)


def _specialisation(one: Specialisation, prefix: str) -> Iterator[Text]:
    yield Text(f"{prefix}joint", str(one.joint.program))
    if one.passes:
        yield Text(f"{prefix}passes", passes_text(one.passes))
    for outputs, cut in sorted(one.partitions.items()):
        yield from stage_texts(cut, f"{prefix}outputs " if outputs and len(one.partitions) > 1 else prefix)


def passes_text(records: Iterable[Record]) -> str:
    """Who changed the program, in order; without times, which differ from run to run."""
    return "".join(f"{one.made_by}: {one.nodes_before} -> {one.nodes_after} nodes\n" for one in records)


def stage_texts(cut: Partitioned, prefix: str = "") -> Iterator[Text]:
    """The prologue and every stage's programs, each once."""
    return (Text(f"{prefix}{program.name}", str(program)) for program in cut.programs)
