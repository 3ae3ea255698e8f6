"""The compiler: runs the stations in order. capture, passes, partition, schedule, lower, compile."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any

import sympy
import torch
from torch import nn

from graphcomp import backend as backends
from graphcomp import schedule as schedules
from graphcomp.backend import Backend, Boxed
from graphcomp.backend import Progress as BackendProgress
from graphcomp.capture import Joint, capture
from graphcomp.capture.facts import Facts
from graphcomp.capture.guards import read_captured
from graphcomp.capture.joint import LossChunks
from graphcomp.capture.spelled import PASSING, lines
from graphcomp.compat.symbols import symbol_names
from graphcomp.dataparallel.step import DataParallel
from graphcomp.errors import StepError
from graphcomp.ir import meta
from graphcomp.ir import signature as role
from graphcomp.ir.comparable import comparable
from graphcomp.ir.normalize import number_names
from graphcomp.ir.program import Program
from graphcomp.ir.verify import verify
from graphcomp.partition import Partitioned, partition
from graphcomp.partition.accumulating import accumulating
from graphcomp.partition.batch_numbers import read_before
from graphcomp.partition.homes import Homes, homes_of
from graphcomp.passes.base import Pass
from graphcomp.passes.chunk_loss import ChunkLoss, rows_of_loss
from graphcomp.passes.cse import CommonSubexpressions
from graphcomp.passes.dead_code import DeadCode
from graphcomp.passes.functionalize import Functionalize
from graphcomp.passes.manager import PassManager, Record
from graphcomp.passes.noop import NoOp
from graphcomp.passes.row_region import find_head
from graphcomp.passes.seeded_random import SeededRandom
from graphcomp.passes.split_norms import SplitNorms
from graphcomp.plan import DATA_AXES, Plan
from graphcomp.progress import Progress
from graphcomp.runtime.program.instructions import RankProgram, RunKind
from graphcomp.runtime.program.lower import lower, traffic
from graphcomp.runtime.program.streams import prove
from graphcomp.schedule import Schedule

LossFunction = Callable[[Any, Any], Any]


def joint_passes(seeded: bool, in_turn: bool = False) -> list[Pass]:
    """The passes between capture and partition. seeded: random draws become functions of the step's seed.

    in_turn: several data ranks change the same buffers.
    """
    first: list[Pass] = [Functionalize(), *([SplitNorms()] if in_turn else []), *([SeededRandom()] if seeded else [])]
    return [*first, NoOp(), CommonSubexpressions(), DeadCode()]


def chunk_passes(plan: Plan) -> list[Pass]:
    """Those that compute head and loss in chunks. Where a schedule parts forward and backward, logits come twice."""
    repeat = not schedules.get(plan.schedule).fuses
    return [ChunkLoss(plan.loss_chunks, repeat=repeat), DeadCode()]


def _without_outputs(program: Program) -> Program:
    """A copy that yields nothing of the model's own output."""
    copy = program.copy()
    kept = [(what, node) for what, node in copy.output_items() if not isinstance(what, role.Output)]
    copy.output_node.args = (tuple(node for _, node in kept),)
    copy.set_signature(copy.inputs, [what for what, _ in kept])
    return copy


@dataclass
class Specialisation:
    """One captured joint program with all that was made from it so far.

    partitions: by whether the model's outputs are kept. callables: what this rank has compiled. kind: what it was
    captured from, as text; where that is equal in two processes, so are the programs. state: of the model, then.
    """

    number: int
    joint: Joint
    passes: tuple[Record, ...] = ()
    partitions: dict[bool, Partitioned] = field(default_factory=dict)
    callables: dict[tuple[bool, int, RunKind], Boxed] = field(default_factory=dict)
    kind: str = ""
    state: Facts = field(default_factory=lambda: Facts({}))

    @cached_property
    def text_to_compare(self) -> str:
        """The joint program as other processes have it if they have the same."""
        return comparable(self.joint.program)

    def modes(self) -> list[str]:
        """What may make it another program than other processes have, though the model is the same: a line each."""
        return lines(self.state, PASSING.__contains__)

    def read_captured(self) -> dict[str, torch.Tensor]:
        """The tensors that user code reaches by itself, as they are now. Raises GuardError if one has another form."""
        forms = self._captured_forms
        return read_captured({name: self.joint.captured[name] for name in forms}, forms) if forms else {}

    @cached_property
    def _captured_forms(self) -> dict[str, torch.Tensor]:
        found = ((what, meta.tensor(node)) for what, node in self.joint.program.input_nodes())
        return {what.name: fake for what, fake in found if isinstance(what, role.Captured) and fake is not None}


class GraphCompiler:
    """The stations one by one, for those who want to see the programs in between.

        compiler = GraphCompiler(model, loss_fn, plan)
        print(compiler.capture(example))   # the joint program
        print(compiler.partition())        # the stage programs and their boundaries
        print(compiler.lower())            # the rank programs
        compiler.compile()                 # callables, by (stage, kind)

    Each station works on the latest result of the one before. Nothing here needs a process group: any number of
    stages can be looked at on one process. `compile_train_step` drives the same stations.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFunction | None = None,
        plan: Plan | None = None,
        *,
        rank: int | None = None,
        data_ranks: int = 1,
        trace: Callable[..., Joint] | None = None,
    ) -> None:
        self.data_ranks, self._trace = data_ranks, trace
        self.model, self.loss_fn, self.plan = model, loss_fn, plan or Plan()
        self.progress = Progress(self.plan.quiet, rank)
        self.backend: Backend = backends.get(self.plan.backend, self._tell, self.plan.compile_options)
        self.specialisations: list[Specialisation] = []
        self.traces = 0
        self.homes: dict[str, tuple[int, ...]] = {}
        self._proven: set[Hashable] = set()

    def capture(self, example: Any, *, training: bool = True, device: Any = None) -> Joint:
        """The joint program of a microbatch like `example`, after the passes. Adds a specialisation.

        training: with its backward; otherwise forward and loss only.
        """
        with self.progress.work("capturing", "captured the joint program"), _no_collection():
            mesh = self.plan.mesh
            trace = capture if self._trace is None else self._trace
            joint = trace(self.model, self.loss_fn, example, training=training, device=device, mesh=mesh)
            self.traces += 1
            manager = PassManager(joint_passes(self.is_cut, self.in_turn))
            program, before = read_before(manager.run(joint.program))
            if before is not None:
                verify(before.program, made_by="read_before")
                program = PassManager([DeadCode()]).run(program)
            number_names(program.graph)
        joint = replace(joint, program=program, before=before)
        self.specialisations.append(Specialisation(len(self.specialisations), joint, tuple(manager.records)))
        return joint

    @property
    def is_cut(self) -> bool:
        """Whether more than one stage or process takes part, so that draws must not depend on who runs what."""
        return self.plan.stage_count > 1 or self.plan.mesh is not None or self.data_ranks > 1

    @property
    def in_turn(self) -> bool:
        """Whether several data ranks change the same buffers, one after the other."""
        return max(self.data_ranks, *map(self.plan.axis, DATA_AXES)) > 1

    def partition(self, specialisation: Specialisation | None = None, *, outputs: bool = False) -> Partitioned:
        """The stages of a specialisation (the latest by default). outputs: with the model's own outputs."""
        one = specialisation or self._latest()
        if outputs not in one.partitions:
            homes = self.homes if self.is_cut else None
            joint = one.joint if self.plan.loss_chunks == 1 else self._chunked(one, outputs)
            cut = partition(
                joint, self.plan.stage_count, self.plan.split, outputs=outputs, homes=homes, in_turn=self.in_turn
            )
            for program in cut.programs:
                verify(program, made_by="partition")
            one.partitions[outputs] = cut
            self.homes = homes_of(cut.stages) | self.homes
        return one.partitions[outputs]

    def _chunked(self, one: Specialisation, outputs: bool) -> Joint:
        """The joint program without unwanted outputs, and with head and loss in chunks if all have two rows or more.

        Whether they have becomes a condition: fewer rows have a program of their own, with all logits at once.
        """
        joint, limit = one.joint, 2 * self.plan.loss_chunks
        program = joint.program if outputs else _without_outputs(joint.program)
        program = PassManager([DeadCode()]).run(program)
        rows, example = rows_of_loss(program)
        enough = example is None or example >= limit
        chunks = LossChunks(self.plan.loss_chunks, meta.note(find_head(program)).module or "", rows) if enough else None
        if enough:
            program = PassManager(chunk_passes(self.plan)).run(program)
        if symbol_names([rows]) <= joint.sizes.symbols.keys():  # or no microbatch says how many there are
            condition = sympy.Ge(rows, limit) if enough else sympy.Lt(rows, limit)
            self.add_conditions(one, [condition] if condition.free_symbols else [])
        number_names(program.graph)
        return replace(one.joint, program=program, chunks=chunks)

    def follow(self, homes: Homes, specialisations: Sequence[Specialisation], outputs: bool) -> None:
        """Take over the homes that all data ranks have agreed on; cut what is not cut, or was cut otherwise."""
        self.homes = dict(homes)
        for one in specialisations:
            own = homes_of(one.partitions[outputs].stages) if outputs in one.partitions else {}
            if own and all(set(stages) <= set(self.homes.get(name, stages)) for name, stages in own.items()):
                self.homes = own | self.homes
            else:
                one.partitions.pop(outputs, None)
                self.partition(one, outputs=outputs)

    def schedule(self, partitioned: Sequence[Partitioned]) -> Schedule:
        """The plan's schedule for these microbatches, with the transfers that they need; checked."""
        stages, ranks = self.plan.stage_count, self.plan.pipeline_ranks
        idle = frozenset(s for s in range(stages) if all(one.stages[s].backward is None for one in partitioned))
        forward = frozenset(s for one in partitioned for s in one.forward_boundaries)
        backward = frozenset(s for one in partitioned for s in one.backward_boundaries)
        return _schedule(self.plan.schedule, stages, len(partitioned), ranks, idle, forward, backward)

    def lower(
        self,
        partitioned: Sequence[Partitioned] | None = None,
        *,
        outputs: bool = False,
        rank: int | None = None,
        data: DataParallel | None = None,
        data_rank: int = 0,
    ) -> RankPrograms:
        """The programs of all ranks, or of one, for a step with these microbatches (by default as many as stages).

        data: what the step does over data ranks, if there are several, of which this one is `data_rank`.
        """
        given = partitioned or [self.partition(outputs=outputs)] * self.plan.stage_count
        schedule = self.schedule(given)
        key = traffic(given, schedule, data)
        proven = key in self._proven  # which takes the programs of all ranks
        ranks = range(len(schedule.ranks)) if rank is None or not proven else [rank]
        programs = tuple(lower(given, schedule, one, outputs, data, data_rank) for one in ranks)
        if not proven:
            prove(programs, schedule.placement)
            self._proven.add(key)
        return RankPrograms(schedule, tuple(one for one in programs if rank in (None, one.rank)))

    def compile(
        self,
        programs: RankPrograms | None = None,
        specialisations: Sequence[Specialisation] | None = None,
        *,
        outputs: bool = False,
    ) -> dict[tuple[int, int, RunKind], Boxed]:
        """Callables for all that the rank programs run, by (place in the step's distinct specialisations, stage, kind).

        What a specialisation has compiled before is not compiled again. Conditions that a backend adds join the
        specialisation's sizes.
        """
        programs = programs or self.lower(outputs=outputs)
        ordered = list({one.number: one for one in specialisations or [self._latest()]}.values())
        found: dict[tuple[int, int, RunKind], Boxed] = {}
        for place, stage, kind in sorted({key for program in programs.ranks for key in program.needed}):
            one = ordered[place]
            key = (outputs, stage, kind)
            if key not in one.callables:
                cut = one.partitions[outputs]
                program = accumulating(getattr(cut.stages[stage], kind), cut, self.plan.accumulate_dtype)
                compiled = self.backend.compile(program, one.joint.groups)
                one.callables[key] = compiled.call
                if compiled.conditions:
                    self.add_conditions(one, compiled.conditions)
            found[place, stage, kind] = one.callables[key]
        return found

    def add_conditions(self, one: Specialisation, conditions: Sequence[Any]) -> None:
        """A specialisation serves only microbatches that meet these as well."""
        one.joint = replace(one.joint, sizes=one.joint.sizes.with_conditions(conditions))

    def _latest(self) -> Specialisation:
        if not self.specialisations:
            raise StepError("nothing was captured yet", do="call capture(example) first")
        return self.specialisations[-1]

    def _tell(self, event: BackendProgress) -> None:
        if event.state == "compiled" and self.plan.backend != "eager":
            self.progress.say(f"compiled {event.program} in {event.seconds:.1f} s")


@lru_cache(maxsize=64)
def _schedule(
    name: str,
    stages: int,
    microbatches: int,
    ranks: int,
    idle: frozenset[int],
    forward: frozenset[int],
    backward: frozenset[int],
) -> Schedule:
    """idle: the stages without a backward. forward, backward: those that send activations and gradients."""
    built = schedules.get(name).build(stages, microbatches, ranks)
    timed = schedules.with_transfers(schedules.without_backward(built, idle), forward, backward)
    schedules.check(timed)
    return schedules.fuse(timed)


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Without cyclic garbage collection: a trace makes many objects that stay, and looking through them again and again
    takes a sixth of a first capture's time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@dataclass(frozen=True)
class RankPrograms:
    """The schedule of a step, and the programs of one or all ranks."""

    schedule: Schedule
    ranks: tuple[RankProgram, ...]

    def __str__(self) -> str:
        return "\n".join([self.schedule.text(), *map(str, self.ranks)])
