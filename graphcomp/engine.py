"""The engine: runs bound microbatches on this process's ranks of the pipeline; nothing is written before it ends."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from graphcomp.compiler import GraphCompiler, RankPrograms, Specialisation
from graphcomp.dispatch import Bound, Dispatcher, as_microbatches
from graphcomp.errors import RankFailure, StepError
from graphcomp.ir import meta
from graphcomp.ir import signature as role
from graphcomp.ir.interp import boxed_callable
from graphcomp.ir.randomness import step_seeds
from graphcomp.partition import Partitioned
from graphcomp.runtime.agreement import Agreement
from graphcomp.runtime.closing import Closing
from graphcomp.runtime.executor import RankExecutor, RankResult, run_virtual_ranks
from graphcomp.runtime.inputs import StepInputs
from graphcomp.runtime.layout import Layout
from graphcomp.runtime.outputs import collect_outputs
from graphcomp.runtime.prologue import Counts, count
from graphcomp.runtime.result import StepResult
from graphcomp.runtime.state import LiveState
from graphcomp.runtime.transport import ProcessTransport, Transport, VirtualNetwork, VirtualTransport

KEPT = 64
"""Sequences of specialisations whose rank programs are kept; the oldest goes first. Compiled code is kept apart."""

LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Timed out waiting", "DistBackendError")
"""How a process group says that a peer is gone; it has no error type for that."""


@dataclass(frozen=True)
class Prepared:
    """All that a sequence of specialisations needs in order to run. executors: one for each rank in this process."""

    partitioned: tuple[Partitioned, ...]
    programs: RankPrograms
    executors: tuple[RankExecutor, ...]
    closing: Closing


@dataclass(frozen=True)
class Ran:
    """A finished step, not yet committed. gradients: by name, of the ranks in this process. buffers: new values."""

    result: StepResult
    gradients: Mapping[str, torch.Tensor]
    buffers: Mapping[str, torch.Tensor]
    messages: int
    bytes_sent: int
    collectives: int


class Engine:
    """Runs steps for one rank of a layout, or for all ranks at once (virtual: messages in a dictionary)."""

    def __init__(self, compiler: GraphCompiler, layout: Layout, virtual: bool = False) -> None:
        self.compiler, self.layout, self.virtual = compiler, layout, virtual
        self.state = LiveState(compiler.model)
        self.agreement = Agreement(layout)
        self.followed: Hashable = None
        self.broken: str | None = None
        self._prepared: dict[tuple[tuple[int, ...], bool], Prepared] = {}
        self._prologues: dict[int, Any] = {}
        self._scales: dict[tuple[float, torch.dtype], torch.Tensor] = {}

    def prepare(self, specialisations: Sequence[Specialisation], outputs: bool) -> tuple[Prepared, bool]:
        """What a step with these (one a microbatch) needs; True if it was made just now. Ranks agree on it first."""
        numbers = tuple(one.number for one in specialisations)
        found = self._prepared.get((numbers, outputs))
        if found is not None:
            return found, False
        failure: Exception | None = None
        prepared: Prepared | None = None
        try:
            prepared = self._make(specialisations, outputs)
        except Exception as error:
            failure = error
        distinct = {one.number: one for one in specialisations}
        conditions = {number: one.joint.sizes.conditions for number, one in distinct.items()}
        text = "" if prepared is None else _wire_text(prepared)
        shared = self.agreement.share(text, failure, "prepare the step", conditions)
        if prepared is None:
            raise failure if failure is not None else RankFailure("the step could not be prepared")
        for theirs in shared:
            for number, one in distinct.items():
                self.compiler.add_conditions(one, theirs[number])
        while len(self._prepared) >= KEPT:
            del self._prepared[next(iter(self._prepared))]
        self._prepared[numbers, outputs] = prepared
        self.state.refresh()
        self.state.require_real(set(prepared.partitioned[0].parameter_stages))
        return prepared, True

    def _make(self, specialisations: Sequence[Specialisation], outputs: bool) -> Prepared:
        partitioned = tuple(self.compiler.partition(one, outputs=outputs) for one in specialisations)
        rank = None if self.virtual else self.layout.rank
        programs = self.compiler.lower(partitioned, outputs=outputs, rank=rank)
        callables = self.compiler.compile(programs, specialisations, outputs=outputs)
        network = VirtualNetwork()
        executors = tuple(
            RankExecutor(
                program,
                list({id(one): one for one in partitioned}.values()),
                callables,
                self._transport(network),
                self.layout.device,
                self.compiler.plan.accumulate_dtype,
            )
            for program in programs.ranks
        )
        return Prepared(partitioned, programs, executors, Closing(partitioned, self.layout.device))

    def _transport(self, network: VirtualNetwork) -> Transport:
        if self.virtual or self.layout.down is None or self.layout.up is None:
            return VirtualTransport(network)
        return ProcessTransport(self.layout.down, self.layout.up, range(self.layout.stages))

    def run(self, bound: Sequence[Bound], outputs: str = "none", loss_scale: float = 1.0) -> Ran:
        """One step over microbatches that `prepare` was called for. Writes to nothing of the model."""
        prepared, _ = self.prepare([one.specialisation for one in bound], outputs != "none")
        try:
            counts = self._count(bound, prepared)
            inputs = self._inputs(bound, prepared, counts, loss_scale)
            for executor in prepared.executors:
                executor.begin(inputs)
            return self._finish(bound, prepared, counts, run_virtual_ranks(prepared.executors), outputs)
        except Exception as error:
            for executor in prepared.executors:
                executor.drop()
            if self.virtual or self.layout.side is None:
                raise
            self.broken = f"{type(error).__name__}: {error}".splitlines()[0]
            if any(text in self.broken for text in LOST):
                raise RankFailure(
                    "another rank is gone, or has left the step",
                    where="; ".join(getattr(error, "__notes__", [])) or f"rank {self.layout.rank}",
                    got=self.broken,
                    do="see the error of the rank that failed first; nothing was written to gradients or buffers",
                ) from error
            raise

    def _count(self, bound: Sequence[Bound], prepared: Prepared) -> Counts:
        counted: list[dict[str, torch.Tensor]] = []
        for one, cut in zip(bound, prepared.partitioned, strict=True):
            if cut.prologue is None:
                counted.append({})
                continue
            call = self._prologues.get(id(cut.prologue))
            if call is None:
                call = self._prologues[id(cut.prologue)] = boxed_callable(cut.prologue)
            box = [self._prologue_input(what, one, cut) for what in cut.prologue.inputs]
            with torch.no_grad():
                values = call(box)
            counted.append(dict(zip((what.loss for what in cut.prologue.outputs), values, strict=True)))  # type: ignore[attr-defined]
        return count(prepared.closing.losses, counted, self.layout.device)

    def _prologue_input(self, what: role.Role, one: Bound, cut: Partitioned) -> Any:
        match what:
            case role.BatchLeaf(path):
                return one.leaves[path]
            case role.Size(symbol):
                return one.sizes[symbol]
            case role.Constant(name):
                return cut.joint.program.constants[name]
            case role.Captured(name):
                return cut.joint.captured[name].read()
        raise RankFailure(f"the prologue has an input it may not have: {what}")

    def _inputs(self, bound: Sequence[Bound], prepared: Prepared, counts: Counts, loss_scale: float) -> StepInputs:
        joints = {id(cut.joint): cut.joint for cut in prepared.partitioned}.values()
        wants_seed = any(role.Seed() in joint.program.inputs for joint in joints)
        seeds: Sequence[torch.Tensor | None] = [None] * len(bound)
        if wants_seed:
            seeds = self.agreement.of_the_first(torch.stack(step_seeds(len(bound)))).unbind()
        specialisations = {one.specialisation.number: one.specialisation for one in bound}.values()
        captured = {name: value for one in specialisations for name, value in one.read_captured().items()}
        return StepInputs(
            microbatches=[one.inputs(seed) for one, seed in zip(bound, seeds, strict=True)],
            parameters=self.state.parameters(),
            buffers=self.state.buffers(),
            captured=captured,
            denominators=counts.denominators,
            loss_scale=self._scale(prepared, loss_scale),
        )

    def _scale(self, prepared: Prepared, loss_scale: float) -> torch.Tensor | None:
        for cut in prepared.partitioned:
            for what, node in cut.joint.program.input_nodes():
                found = meta.tensor(node) if isinstance(what, role.LossScale) else None
                if found is not None:
                    key = (loss_scale, found.dtype)
                    if key not in self._scales:
                        self._scales[key] = torch.full((), loss_scale, dtype=found.dtype, device=self.layout.device)
                    return self._scales[key]
        return None

    def _finish(
        self, bound: Sequence[Bound], prepared: Prepared, counts: Counts, results: Sequence[RankResult], outputs: str
    ) -> Ran:
        vector = sum(
            prepared.closing.pack(result.records, program.stages)
            for result, program in zip(results, prepared.programs.ranks, strict=True)
        )
        collectives = 0
        if self.layout.closing is not None and not self.virtual:
            dist.all_reduce(vector, group=self.layout.closing)
            collectives += 1
        closed = prepared.closing.close(vector, counts.denominators)  # type: ignore[arg-type]
        kept = None
        if outputs != "none":
            group = None if self.virtual or outputs == "local" else self.layout.closing
            kept, sent = collect_outputs(
                prepared.partitioned, [one.sizes for one in bound], results, self.layout, group
            )
            collectives += sent
        gradients: dict[str, torch.Tensor] = {}
        buffers: dict[str, torch.Tensor] = {}
        for result in results:
            for own in result.gradients.values():
                gradients = {**own, **gradients}  # shared ones are equal on all their stages
            buffers |= result.buffers
        return Ran(
            StepResult(closed.loss, closed.losses, counts.tokens, closed.metrics, closed.microbatch_losses, kept),
            gradients,
            buffers,
            sum(result.messages for result in results),
            sum(result.bytes_sent for result in results),
            collectives,
        )


def bind(
    dispatcher: Dispatcher,
    engine: Engine,
    microbatches: Iterable[Any],
    *,
    training: bool = True,
    outputs: str = "none",
    loss_scale: float = 1.0,
) -> list[Bound]:
    """Select specialisations and prepare them; again as long as compiling adds conditions that a microbatch breaks.

    What cannot be bound leaves no specialisation behind, on any rank.
    """
    if engine.broken is not None:
        raise StepError(
            "this step is unusable: an earlier one failed while messages were under way",
            where=f"rank {engine.layout.rank}",
            got=engine.broken,
            do="gradients and buffers are as before that step; start the processes again to go on",
        )
    batches: list[Any] | None = None
    for _ in range(engine.compiler.plan.max_programs + 1):
        before, told = len(engine.compiler.specialisations), False
        try:
            batches = as_microbatches(microbatches) if batches is None else batches
            bound = dispatcher.select(batches, training)
            told = True
            engine.agreement.compare_step(*_facts(bound, training, outputs, loss_scale))
        except Exception as error:
            dispatcher.forget(before)
            if not told:
                engine.agreement.compare_step(0, failure=error)
            raise
        if dispatcher.state is not engine.followed:  # the model was read anew: modules may have been replaced
            engine.state.refresh()
            engine.followed = dispatcher.state
        _, is_new = engine.prepare([one.specialisation for one in bound], outputs != "none")
        if not is_new or all(one.specialisation.joint.sizes.accepts(one.sizes, one.leaves) for one in bound):
            return bound
    raise StepError("compiling keeps adding conditions that the microbatches do not meet")


def _facts(bound: Sequence[Bound], training: bool, outputs: str, loss_scale: float) -> tuple[Hashable, str]:
    """What all ranks of a pipeline must have in common in a step: as numbers, and in words."""
    each = tuple((one.specialisation.number, *one.sizes.values()) for one in bound)
    lines = [
        f"{'a training' if training else 'an evaluation'} step of {len(bound)} microbatches",
        f"outputs={outputs!r}, loss_scale={loss_scale}",
        *(f"microbatch {i}: specialisation {n}, sizes {sizes}" for i, (n, *sizes) in enumerate(each)),
    ]
    kinds = ("none", "local", "all")
    return (training, kinds.index(outputs), loss_scale, each), "\n".join(lines)


def _wire_text(prepared: Prepared) -> str:
    """What goes over the wire in a step, as text: the schedule, and each boundary's values."""
    lines = [prepared.programs.schedule.text()]
    for number, cut in enumerate({id(one): one for one in prepared.partitioned}.values()):
        for boundary in (*cut.forward_boundaries.values(), *cut.backward_boundaries.values()):
            for value in boundary.values:
                shape = ", ".join(map(str, value.shape))
                lines.append(
                    f"specialisation {number}: {boundary.source}>{boundary.target} {value.name} {value.dtype} [{shape}]"
                )
        lines += [f"losses {cut.joint.losses}", f"metrics {cut.joint.metrics}"]
        lines += [f"parameter {name}: stages {stages}" for name, stages in cut.parameter_stages.items()]
    return "\n".join(lines)
