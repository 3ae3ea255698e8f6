"""The engine: runs bound microbatches on this process's ranks of the pipeline; nothing is written before it ends."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from graphcomp.compiler import GraphCompiler, RankPrograms
from graphcomp.dispatch import Bound, Dispatcher
from graphcomp.errors import AgreementError, RankFailure, StepError
from graphcomp.ir import meta
from graphcomp.ir import signature as role
from graphcomp.ir.interp import boxed_callable
from graphcomp.ir.randomness import step_seeds
from graphcomp.partition import Partitioned
from graphcomp.runtime.closing import Closing
from graphcomp.runtime.executor import RankExecutor, RankResult, run_virtual_ranks
from graphcomp.runtime.inputs import StepInputs
from graphcomp.runtime.layout import Layout
from graphcomp.runtime.outputs import collect_outputs
from graphcomp.runtime.prologue import Counts, count
from graphcomp.runtime.result import StepResult
from graphcomp.runtime.state import LiveState
from graphcomp.runtime.transport import ProcessTransport, Transport, VirtualNetwork, VirtualTransport


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
        self._prepared: dict[tuple[tuple[int, ...], bool], Prepared] = {}
        self._prologues: dict[int, Any] = {}
        self._scales: dict[tuple[float, torch.dtype], torch.Tensor] = {}

    def prepare(self, bound: Sequence[Bound], outputs: bool) -> tuple[Prepared, bool]:
        """What these microbatches need; True if it was made just now. Ranks of a pipeline agree on it first."""
        numbers = tuple(one.specialisation.number for one in bound)
        found = self._prepared.get((numbers, outputs))
        if found is not None:
            return found, False
        specialisations = [one.specialisation for one in bound]
        failure: Exception | None = None
        prepared: Prepared | None = None
        conditions = [one.joint.sizes.conditions for one in specialisations]
        try:
            prepared = self._make(specialisations, outputs)
        except Exception as error:
            failure = error
        added = {
            one.number: [c for c in one.joint.sizes.conditions if c not in before]
            for one, before in zip(specialisations, conditions, strict=True)
        }
        self._agree(specialisations, prepared, added, failure)
        if prepared is None:
            raise failure if failure is not None else RankFailure("the step could not be prepared")
        self._prepared[numbers, outputs] = prepared
        self.state.refresh()
        self.state.require_real(set(prepared.partitioned[0].parameter_stages))
        return prepared, True

    def _make(self, specialisations: Sequence[Any], outputs: bool) -> Prepared:
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

    def _agree(
        self,
        specialisations: Sequence[Any],
        prepared: Prepared | None,
        added: Mapping[int, Sequence[Any]],
        failure: Exception | None,
    ) -> None:
        """Compare what the ranks will communicate, share the conditions their compilers added, report failures."""
        if self.layout.side is None or self.virtual:
            return
        text = "" if prepared is None else _wire_text(prepared)
        digest = hashlib.sha256(text.encode()).hexdigest()
        mine = (digest, dict(added), None if failure is None else f"{type(failure).__name__}: {failure}")
        everyone: list[Any] = [None] * self.layout.stages
        dist.all_gather_object(everyone, mine, group=self.layout.side)
        for rank, (_, _, error) in enumerate(everyone):
            if error is not None and failure is None:
                raise RankFailure(f"rank {rank} could not prepare the step", where=f"rank {rank}", got=error)
        if failure is not None:
            return
        if len({digest for digest, _, _ in everyone}) > 1:
            texts: list[Any] = [None] * self.layout.stages
            dist.all_gather_object(texts, text, group=self.layout.side)
            other = next(i for i, one in enumerate(everyone) if one[0] != digest)
            lines = zip(text.splitlines(), texts[other].splitlines(), strict=False)
            mine_line, theirs = next(((a, b) for a, b in lines if a != b), ("(shorter)", "(longer)"))
            raise AgreementError(
                "the ranks would not communicate the same values",
                where=f"ranks {self.layout.rank} and {other}",
                expected=f"{mine_line.strip()} (rank {self.layout.rank})",
                got=f"{theirs.strip()} (rank {other})",
                do="give every rank the same model, loss function, plan and microbatches",
            )
        for one in {one.number: one for one in specialisations}.values():
            for _, theirs_added, _ in everyone:
                if theirs_added.get(one.number):
                    self.compiler.add_conditions(one, theirs_added[one.number])

    def run(self, bound: Sequence[Bound], outputs: str = "none", loss_scale: float = 1.0) -> Ran:
        """One step over microbatches that `prepare` was called for. Writes to nothing of the model."""
        prepared, _ = self.prepare(bound, outputs != "none")
        counts = self._count(bound, prepared)
        inputs = self._inputs(bound, prepared, counts, loss_scale)
        for executor in prepared.executors:
            executor.begin(inputs)
        if self.virtual or len(prepared.executors) > 1:
            results = run_virtual_ranks(prepared.executors)
        else:
            results = [prepared.executors[0].run(inputs)]
        return self._finish(bound, prepared, counts, results, outputs)

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
        seeds = step_seeds(len(bound)) if wants_seed else [None] * len(bound)
        captured = {name: source.read() for joint in joints for name, source in joint.captured.items()}
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
            kept, sent = collect_outputs(prepared.partitioned, [one.sizes for one in bound], results, self.layout, group)
            collectives += sent
        gradients: dict[str, torch.Tensor] = {}
        buffers: dict[str, torch.Tensor] = {}
        for result in results:
            for own in result.gradients.values():
                gradients = {**own, **gradients}  # shared ones are equal on all their stages
            buffers |= result.buffers
        return Ran(
            StepResult(
                closed.loss, closed.losses, counts.tokens, closed.metrics, closed.microbatch_losses, kept
            ),
            gradients,
            buffers,
            sum(result.messages for result in results),
            sum(result.bytes_sent for result in results),
            collectives,
        )


def bind(
    dispatcher: Dispatcher, engine: Engine, batches: Sequence[Any], *, training: bool = True, outputs: bool = False
) -> list[Bound]:
    """Select specialisations and prepare them; again as long as compiling adds conditions that a microbatch breaks."""
    for _ in range(engine.compiler.plan.max_programs + 1):
        bound = dispatcher.select(batches, training)
        _, is_new = engine.prepare(bound, outputs)
        if not is_new or all(one.specialisation.joint.sizes.accepts(one.sizes, one.leaves) for one in bound):
            return bound
    raise StepError("compiling keeps adding conditions that the microbatches do not meet")


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
        lines += [f"{name}: stages {stages}" for name, stages in cut.parameter_stages.items() if len(stages) > 1]
    return "\n".join(lines)
