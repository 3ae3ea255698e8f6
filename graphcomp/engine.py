"""The engine: binds microbatches to programs and runs a step on this process's ranks. It writes to nothing."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist

from graphcomp.compiler import GraphCompiler
from graphcomp.dataparallel.rows import join_rows, padded_rows
from graphcomp.dispatch import Bound, Dispatcher, as_microbatches
from graphcomp.errors import AgreementError, RankFailure, StepError
from graphcomp.ir import meta
from graphcomp.ir import signature as role
from graphcomp.ir.randomness import step_seeds
from graphcomp.prepare import Preparation, Prepared, key_of
from graphcomp.runtime.agreement import Agreed, DataRank, Intent, difference
from graphcomp.runtime.closing import Closed, DataRanks
from graphcomp.runtime.counting import Counting
from graphcomp.runtime.executor import RankResult, run_virtual_ranks
from graphcomp.runtime.inputs import StepInputs
from graphcomp.runtime.layout import Layout
from graphcomp.runtime.outputs import collect_outputs
from graphcomp.runtime.prologue import Counts
from graphcomp.runtime.result import StepResult
from graphcomp.runtime.state import LiveState

LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Timed out waiting", "DistBackendError")
"""How a process group says that a peer is gone; it has no error type for that."""


@dataclass(frozen=True)
class Options:
    """How a step is called; the same on all ranks."""

    training: bool = True
    outputs: str = "none"
    loss_scale: float = 1.0
    tokens: tuple[str, ...] = ()
    """The losses whose denominators the caller gives."""

    @property
    def keeps(self) -> bool:
        return self.outputs != "none"


@dataclass(frozen=True)
class Line:
    """One pipeline of this process in a step: its microbatches, and what runs them.

    first: the place of its first microbatch among those of all data ranks.
    """

    bound: tuple[Bound, ...]
    prepared: Prepared
    data_rank: int
    first: int


@dataclass(frozen=True)
class BoundStep:
    """A step that is ready to run. lines: of this process. ranks: what all data ranks have said."""

    lines: tuple[Line, ...]
    ranks: tuple[DataRank, ...]
    options: Options


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
        self.preparation = Preparation(compiler, layout, virtual, self.state)
        self.agreement = self.preparation.agreement
        self.counting = Counting(layout)
        self.followed: Hashable = None
        self.broken: str | None = None
        self._scales: dict[tuple[float, torch.dtype], torch.Tensor] = {}

    def bind(self, dispatcher: Dispatcher, given: Sequence[Iterable[Any]], options: Options) -> BoundStep:
        """Select specialisations and prepare them, until no rank has anything new to prepare.

        given: the microbatches of each pipeline in this process. What cannot be bound leaves no specialisation behind,
        on any rank.
        """
        self._require_usable()
        batches: list[list[Any]] | None = None
        for _ in range(self.compiler.plan.max_programs + 1):
            before, told = len(self.compiler.specialisations), False
            try:
                batches = [as_microbatches(one) for one in given] if batches is None else batches
                bound = [tuple(dispatcher.select(one, options.training)) for one in batches]
                intents = [self._intent(one, options) for one in bound]
                told = True
                agreed = self._compare(intents)
                self._check_meeting(intents, agreed)
            except Exception as error:
                dispatcher.forget(before)
                if not told:
                    self.agreement.compare(Intent(), error)
                raise
            if dispatcher.state is not self.followed:  # the model was read anew: modules may have been replaced
                self.state.refresh()
                self.followed = dispatcher.state
            lines = [[one.specialisation for one in line] for line in bound]
            if not agreed.is_new:
                prepared = self.preparation.link(lines, options.keeps, agreed.ranks)
                self._check_tokens(options, prepared[0])
                return BoundStep(tuple(self._lines(bound, prepared, agreed.ranks)), agreed.ranks, options)
            # Compiling may add conditions that a microbatch of some rank breaks: all ranks select once more.
            try:
                self.preparation.compile(lines, options.keeps)
            except Exception:
                dispatcher.forget(before)
                raise
        raise StepError("compiling keeps adding conditions that the microbatches do not meet")

    def _lines(
        self, bound: Sequence[tuple[Bound, ...]], prepared: Sequence[Prepared], ranks: Sequence[DataRank]
    ) -> Iterator[Line]:
        for place, (own, ready) in enumerate(zip(bound, prepared, strict=True)):
            data_rank = place if self.virtual else self.layout.data_rank
            yield Line(own, ready, data_rank, sum(rank.microbatches for rank in ranks[:data_rank]))

    def _require_usable(self) -> None:
        if self.broken is not None:
            raise StepError(
                "this step is unusable: an earlier one failed while messages were under way",
                where=f"rank {self.layout.rank}",
                got=self.broken,
                do="gradients and buffers are as before that step; start the processes again to go on",
            )

    def _compare(self, intents: Sequence[Intent]) -> Agreed:
        if not self.virtual:
            return self.agreement.compare(intents[0])
        is_new = any(one.is_new for one in intents)
        meets = is_new or len({one.exchanges.number for one in intents}) == 1
        return Agreed(tuple(DataRank(one.contribution, one.microbatches) for one in intents), is_new, meets)

    def _intent(self, bound: Sequence[Bound], options: Options) -> Intent:
        specialisations = [one.specialisation for one in bound]
        each = tuple((one.specialisation.number, *one.sizes.values()) for one in bound)
        word = "a training" if options.training else "an evaluation"
        lines = [
            f"{word} step, outputs={options.outputs!r}, loss_scale={options.loss_scale}, tokens of {options.tokens}",
            f"{len(bound)} microbatches",
            *(f"microbatch {i}: specialisation {n}, sizes {sizes}" for i, (n, *sizes) in enumerate(each)),
        ]
        kinds, names = ("none", "local", "all"), options.tokens
        key = key_of(specialisations, options.keeps)
        return Intent(
            common=(options.training, kinds.index(options.outputs), options.loss_scale, crc32(repr(names).encode())),
            own=each,
            text="\n".join(lines),
            contribution=self.preparation.contribution(specialisations).number,
            microbatches=len(bound),
            is_new=self.preparation.is_new(key),
            exchanges=self.preparation.exchanges(key),
        )

    def _check_meeting(self, intents: Sequence[Intent], agreed: Agreed) -> None:
        """What data ranks do together while their pipelines run, they must do in one order. Raises on all of them."""
        ranks = agreed.ranks
        if self.compiler.plan.regather and len({rank.microbatches for rank in ranks}) > 1:
            raise AgreementError(
                "Plan(regather=True) needs as many microbatches on every data rank",
                got=", ".join(f"{rank.microbatches} on data rank {i}" for i, rank in enumerate(ranks)),
                do="give every data rank the same number, or leave `regather` out",
            )
        if not agreed.meets:
            texts = ["\n".join(one.exchanges.lines) for one in intents]
            self.agreement.share(texts[0], None, "take part in the step", self.agreement.peers)
            raise difference(texts, 0, next(i for i, text in enumerate(texts) if text != texts[0]))

    def _check_tokens(self, options: Options, prepared: Prepared) -> None:
        known = [loss.name for loss in prepared.total.losses]
        unknown = sorted(set(options.tokens) - set(known))
        if unknown:
            raise StepError(
                f"the step has no loss named {', '.join(map(repr, unknown))}",
                where="step(..., tokens=...)",
                expected=f"names from {', '.join(map(repr, known))}",
                got=", ".join(map(repr, options.tokens)),
                do="give what step.count(microbatches) returns",
            )

    def run(self, step: BoundStep, tokens: Mapping[str, torch.Tensor] | None = None) -> Ran:
        """Run it. tokens: denominators in the place of the step's own counts. Writes to nothing of the model."""
        executors = [executor for line in step.lines for executor in line.prepared.executors]
        try:
            counts, collectives = self.count(step)
            if tokens:
                counts = self.counting.replaced(counts, tokens)
            seeds = self._seeds(step)
            for line in step.lines:
                inputs = self._inputs(line, counts, seeds, step.options.loss_scale)
                for executor in line.prepared.executors:
                    executor.begin(inputs)
            return self._finish(step, counts, run_virtual_ranks(executors), collectives)
        except Exception as error:
            for executor in executors:
                executor.drop()
            if self.virtual:
                self.preparation.forget()
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

    def count(self, step: BoundStep) -> tuple[Counts, int]:
        """The tokens of a step, over all its data ranks, and the number of collectives used."""
        bound = [one.inputs(None) for line in step.lines for one in line.bound]
        cuts = [cut for line in step.lines for cut in line.prepared.partitioned]
        return self.counting.count(bound, cuts, step.lines[0].prepared.total)

    def _seeds(self, step: BoundStep) -> Sequence[torch.Tensor | None]:
        """One for each microbatch of all data ranks, in their order; drawn by the job's first rank."""
        count = sum(rank.microbatches for rank in step.ranks)
        if not step.lines[0].prepared.total.seeded:
            return [None] * count
        return self.agreement.of_the_first(torch.stack(step_seeds(count))).unbind()

    def _inputs(
        self, line: Line, counts: Counts, seeds: Sequence[torch.Tensor | None], loss_scale: float
    ) -> StepInputs:
        own = seeds[line.first : line.first + len(line.bound)]
        specialisations = {one.specialisation.number: one.specialisation for one in line.bound}.values()
        captured = {name: value for one in specialisations for name, value in one.read_captured().items()}
        parameters, sharded = self.state.parameters(), line.prepared.sharded
        shards: Mapping[str, torch.Tensor] = {}
        if sharded and self.virtual:
            shards = {n: padded_rows(each, parameters[n].detach(), line.data_rank) for n, each in sharded.items()}
        elif sharded:
            shards = self.state.shards()
        return StepInputs(
            microbatches=[one.inputs(seed) for one, seed in zip(line.bound, own, strict=True)],
            parameters={name: value for name, value in parameters.items() if name not in sharded},
            buffers=self.state.buffers(),
            captured=captured,
            denominators=counts.denominators,
            loss_scale=self._scale(line.prepared, loss_scale),
            shards=shards,
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

    def _finish(self, step: BoundStep, counts: Counts, results: Sequence[RankResult], collectives: int) -> Ran:
        left = iter(results)
        by_line = [[next(left) for _ in line.prepared.executors] for line in step.lines]
        closed, used = self._close(step, by_line, counts)
        collectives += used + sum(result.collectives for result in results)
        kept: list[Any] = []
        for line, own in zip(step.lines, by_line, strict=True) if step.options.keeps else ():
            group = None if self.virtual or step.options.outputs == "local" else self.layout.closing
            sizes = [one.sizes for one in line.bound]
            outputs, sent = collect_outputs(line.prepared.partitioned, sizes, own, self.layout, group)
            kept += outputs
            collectives += sent
        buffers: dict[str, torch.Tensor] = {}
        for result in results:
            buffers |= result.buffers
        first = closed[0]
        reported = StepResult(
            first.loss,
            first.losses,
            counts.tokens,
            first.metrics,
            tuple(share for one in closed for share in one.microbatch_losses),
            tuple(kept) if step.options.keeps else None,
        )
        return Ran(
            reported,
            _gradients(step.lines, by_line),
            buffers,
            sum(result.messages for result in results),
            sum(result.bytes_sent for result in results),
            collectives,
        )

    def _close(
        self, step: BoundStep, by_line: Sequence[Sequence[RankResult]], counts: Counts
    ) -> tuple[list[Closed], int]:
        """Losses and metrics of each pipeline in this process, and the number of collectives used."""
        vectors: list[Any] = [
            sum(
                line.prepared.closing.pack(result.records, program.stages)
                for result, program in zip(results, line.prepared.programs.ranks, strict=True)
            )
            for line, results in zip(step.lines, by_line, strict=True)
        ]
        closing, *others = [line.prepared.closing for line in step.lines]
        if self.virtual:
            return closing.close_together(others, vectors, counts.denominators), 0
        used = 0
        if self.layout.closing is not None:
            dist.all_reduce(vectors[0], group=self.layout.closing)
            used += 1
        data = None
        if self.layout.data is not None:

            def reduce(operation: Any) -> Any:
                def over_data_ranks(vector: torch.Tensor) -> None:
                    nonlocal used
                    dist.all_reduce(vector, operation, group=self.layout.data)
                    used += 1

                return over_data_ranks

            first = self.layout.data_rank == 0
            data = DataRanks(reduce(dist.ReduceOp.SUM), reduce(dist.ReduceOp.MAX), first)
        closed = closing.close(vectors[0], counts.denominators, data)
        return [closed], used


def _gradients(lines: Sequence[Line], by_line: Sequence[Sequence[RankResult]]) -> dict[str, torch.Tensor]:
    """By name, as the first pipeline of this process has them; what virtual data ranks hold rows of is put together."""
    each: list[dict[str, torch.Tensor]] = []
    for results in by_line:
        gradients: dict[str, torch.Tensor] = {}
        for result in results:
            for own in result.gradients.values():
                gradients = {**own, **gradients}  # shared ones are equal on all their stages
        each.append(gradients)
    sharded = lines[0].prepared.sharded if len(lines) > 1 else {}
    joined = {name: join_rows(of, [one[name] for one in each]) for name, of in sharded.items() if name in each[0]}
    return each[0] | joined
