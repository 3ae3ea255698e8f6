"""The end of a step: its results over all ranks, the last look at them, and then all writes at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any

import torch
import torch.distributed as dist

from graphcomp.call import BoundStep, Line, Ran
from graphcomp.dataparallel.rows import join_rows
from graphcomp.runtime.failures.failure import Progress
from graphcomp.runtime.failures.signals import signals_held
from graphcomp.runtime.program.executor import RankResult
from graphcomp.runtime.program.finite import Place
from graphcomp.runtime.ranks.agreement import Agreement
from graphcomp.runtime.ranks.layout import Layout
from graphcomp.runtime.results.closing import Closed, DataRanks
from graphcomp.runtime.results.hooks import Looking
from graphcomp.runtime.results.outputs import collect_outputs
from graphcomp.runtime.results.prologue import Counts
from graphcomp.runtime.results.result import StepResult
from graphcomp.runtime.state.live import LiveState, Writes


@dataclass(frozen=True)
class Ending:
    """Ends steps of one rank of a layout, or of all ranks at once (virtual)."""

    layout: Layout
    virtual: bool
    state: LiveState
    agreement: Agreement
    progress: Progress

    def finish(
        self,
        step: BoundStep,
        counts: Counts,
        results: Sequence[RankResult],
        collectives: int,
        looking: Looking,
    ) -> Ran:
        """Bring together what all ranks have computed, and write it if the step's options say so.

        results: in order of the step's pipelines, and of the ranks of each. collectives: issued so far.
        """
        left = iter(results)
        by_line = [[next(left) for _ in line.prepared.executors] for line in step.lines]
        collectives += sum(result.collectives for result in results)
        kept: list[Any] = []
        for line, own in zip(step.lines, by_line, strict=True) if step.options.keeps else ():
            group = None if self.virtual or step.options.outputs == "local" else self.layout.closing
            sizes = [one.sizes for one in line.bound]
            buffers_now = self.state.buffers().values()
            outputs, sent = collect_outputs(line.prepared.partitioned, sizes, own, self.layout, group, buffers_now)
            kept += outputs
            collectives += sent
        buffers: dict[str, torch.Tensor] = {}
        for result in results:
            buffers |= result.buffers
        gradients = _gradients(step.lines, by_line)
        writes = Writes()
        if step.options.training and not self.virtual:
            writes = self.state.writes({} if step.options.holds else gradients, buffers)
        if step.options.inspects:
            self.progress.doing = "in the closing exchange of losses"
            closed, used, vectors = self._close(step, by_line, counts)
            self.progress.doing = "looking at the results"
            seen = self._look(step, counts, vectors, kept, looking)
        with signals_held():
            if step.options.inspects:
                self.progress.come_to("closing", "looking at the results")
                looking.agree(self.agreement, *seen)
            else:
                self.progress.come_to("closing", "in the closing exchange of losses")
                closed, used, _ = self._close(step, by_line, counts)
            if self.layout.device.type != "cpu":
                self.agreement.meet()  # the host has not waited for the exchange
            self.progress.come_to("writing", "writing gradients and buffers")
            writes.write()
            self.progress.come_to("complete", "through with the step")
        first = closed[0]
        reported = StepResult(
            first.loss,
            first.losses,
            counts.tokens,
            first.metrics,
            tuple(share for one in closed for share in one.microbatch_losses),
            tuple(kept) if step.options.keeps else None,
            {one.name: one.reduction for one in step.lines[0].prepared.total.metrics},
            first.counts,
        )
        return Ran(
            reported,
            gradients,
            buffers,
            sum(result.messages for result in results),
            sum(result.bytes_sent for result in results),
            collectives + used,
        )

    def _look(
        self, step: BoundStep, counts: Counts, vectors: Sequence[torch.Tensor], outputs: Sequence[Any], looking: Looking
    ) -> tuple[list[Place | None], Exception | None]:
        """Where this process's ranks have something that is not finite; and what a hook has raised here."""
        watches = [(line, one.watch) for line in step.lines for one in line.prepared.executors]
        places = [watch.first(line.data_rank) for line, watch in watches if watch is not None]
        each = zip((line.prepared.closing for line in step.lines), vectors, strict=True)
        parts = [part for closing, vector in each for part in closing.of_each(vector, counts.denominators)]
        return places, looking.run_hooks(parts, outputs)

    def _close(
        self, step: BoundStep, by_line: Sequence[Sequence[RankResult]], counts: Counts
    ) -> tuple[list[Closed], int, Sequence[torch.Tensor]]:
        """Losses and metrics of each pipeline in this process, how many collectives it took, the whole vectors."""
        vectors = [
            reduce(add, [pack(own.values) for pack, own in zip(line.prepared.packings, results, strict=True)])
            for line, results in zip(step.lines, by_line, strict=True)
        ]
        closing, *others = [line.prepared.closing for line in step.lines]
        if self.virtual:
            return closing.close_together(others, vectors, counts.denominators), 0, vectors
        used = self.layout.add_up(vectors[0])
        if self.layout.tensor is not None:  # they have the same: the first one's, so that none comes through alone
            if self.layout.tensor_rank:
                vectors[0].zero_()
            dist.all_reduce(vectors[0], group=self.layout.tensor)
            used += 1
        data = None
        if self.layout.data is not None:

            def through(operation: Any) -> Any:
                def over_data_ranks(vector: torch.Tensor) -> None:
                    nonlocal used
                    dist.all_reduce(vector, operation, group=self.layout.data)
                    used += 1

                return over_data_ranks

            first = self.layout.data_rank == 0
            data = DataRanks(through(dist.ReduceOp.SUM), through(dist.ReduceOp.MAX), first)
        closed = closing.close(vectors[0], counts.denominators, data)
        return [closed], used, vectors


def _gradients(lines: Sequence[Line], by_line: Sequence[Sequence[RankResult]]) -> dict[str, torch.Tensor]:
    """By name, as the first pipeline of this process has them; what virtual data ranks hold rows of is put together."""
    each: list[dict[str, torch.Tensor]] = []
    for results in by_line:
        gradients: dict[str, torch.Tensor] = {}
        for result in results:
            for own in result.gradients.values():
                gradients = {**own, **gradients} if gradients else {**own}  # shared ones are equal on all stages
        each.append(gradients)
    sharded = lines[0].prepared.sharded if len(lines) > 1 else {}
    joined = {name: join_rows(of, [one[name] for one in each]) for name, of in sharded.items() if name in each[0]}
    return each[0] | joined if joined else each[0]
