"""The engine: binds microbatches to programs and runs a step on this process's ranks, whole or not at all."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from graphcomp.call import BoundStep, Line, Options, Ran, contents_of, contents_text, intent_text
from graphcomp.capture.facts import Facts
from graphcomp.compat.process_groups import group_of
from graphcomp.compiler import GraphCompiler
from graphcomp.dataparallel.rows import padded_rows
from graphcomp.dispatch import Bound, Dispatcher, as_microbatches
from graphcomp.ending import Ending
from graphcomp.errors import AgreementError, GraphcompError, StepError
from graphcomp.ir.randomness import step_seeds
from graphcomp.owned import Owned
from graphcomp.prepare import Key, Preparation, Prepared, key_of
from graphcomp.runtime.failures.failure import Failures, Progress
from graphcomp.runtime.failures.together import Together
from graphcomp.runtime.program.executor import run_virtual_ranks
from graphcomp.runtime.program.inputs import StepInputs
from graphcomp.runtime.ranks.agreement import Agreed, DataRank, Intent
from graphcomp.runtime.ranks.difference import difference
from graphcomp.runtime.ranks.layout import Layout
from graphcomp.runtime.results.counting import Counting
from graphcomp.runtime.results.hooks import Looking
from graphcomp.runtime.results.prologue import Counts
from graphcomp.runtime.state.initial import Recipe
from graphcomp.runtime.state.live import LiveState


class Engine:
    """Runs steps for one rank of a layout, or for all ranks at once (virtual: messages in a dictionary)."""

    def __init__(
        self, compiler: GraphCompiler, layout: Layout, virtual: bool = False, state: LiveState | None = None
    ) -> None:
        self.compiler, self.layout, self.virtual = compiler, layout, virtual
        self.state = state or LiveState(compiler.model)
        self.owned = Owned(compiler, layout, virtual)
        self.preparation = Preparation(compiler, layout, virtual, self.state, self.owned)
        self.agreement = self.preparation.agreement
        self.counting = Counting(layout)
        self.progress = Progress()
        self.ending = Ending(layout, virtual, self.state, self.agreement, self.progress)
        self.failures = Failures(layout, self.progress, self._shared_groups)
        self.together = Together(self.agreement, self.failures, self.progress, self.require_usable)
        self.closed = False
        self.followed: Hashable = None
        self.compared = self.virtual or all(len(line) == 1 for line in self.agreement.lines)
        self._latest_scale: tuple[object, torch.Tensor | None] = None, None

    def bind(self, dispatcher: Dispatcher, given: Sequence[Iterable[Any]], options: Options) -> BoundStep:
        """Select specialisations and prepare them, until no rank has anything new to prepare.

        given: the microbatches of each pipeline in this process. What cannot be bound leaves no specialisation behind,
        on any rank.
        """
        self.require_usable()
        self.progress.begin("preparing the step")
        return self.failures.guarded(lambda: self._bind(dispatcher, given, options), self.agreement.known)

    def refuse(self, error: GraphcompError) -> NoReturn:
        """Raise the error of a call that this rank cannot make, when the others, who come to it, have been told."""
        self.require_usable()
        self.progress.begin("preparing the step")

        def tell() -> None:
            self.agreement.compare(Intent(), error)
            raise error

        self.failures.guarded(tell, self.agreement.known)
        raise error

    def _bind(self, dispatcher: Dispatcher, given: Sequence[Iterable[Any]], options: Options) -> BoundStep:
        batches: list[list[Any]] | None = None
        for _ in range(self.compiler.plan.max_programs + 1):
            before, told = len(self.compiler.specialisations), False
            try:
                batches = [as_microbatches(one) for one in given] if batches is None else batches
                bound = [tuple(dispatcher.select(one, options.training)) for one in batches]
                if dispatcher.state is not self.followed:  # the model was read anew: modules may have been replaced
                    self.state.refresh()
                    self.followed = dispatcher.state
                if options.runs and self.state.on_meta:
                    self.state.require_real(self.owned.used)
                keys = [key_of([one.specialisation for one in line], options.keeps) for line in bound]
                state = dispatcher.state
                intents = [self._intent(one, options, key, state) for one, key in zip(bound, keys, strict=True)]
                told = True
                agreed = self._compare(intents)
                self._check_meeting(intents, agreed)
            except Exception as error:
                dispatcher.forget(before)
                if not told:
                    self.agreement.compare(Intent(), error)
                raise
            if not agreed.is_new:
                if options.runs and not self.compared:
                    self._compare_contents(bound)
                prepared = self.preparation.link(keys, agreed.ranks)
                if options.tokens:
                    self._check_tokens(options, prepared[0])
                return BoundStep(tuple(self._lines(bound, prepared, agreed.ranks)), agreed.ranks, options)
            # Compiling may add conditions that a microbatch of some rank breaks: all ranks select once more.
            try:
                self.preparation.compile([[one.specialisation for one in line] for line in bound], options.keeps)
            except Exception:
                dispatcher.forget(before)
                raise
        endless = StepError("compiling keeps adding conditions that the microbatches do not meet")
        raise self.agreement.told(endless)

    def _lines(
        self, bound: Sequence[tuple[Bound, ...]], prepared: Sequence[Prepared], ranks: Sequence[DataRank]
    ) -> Iterator[Line]:
        for place, (own, ready) in enumerate(zip(bound, prepared, strict=True)):
            data_rank = place if self.virtual else self.layout.data_rank
            yield Line(own, ready, data_rank, sum(rank.microbatches for rank in ranks[:data_rank]))

    def close(self) -> Engine:
        """One that runs nothing, in the place of this one, which has given back its groups and channels.

        All ranks must call it, unless a failure has ended the step.
        """
        if self.failures.broken is None and dist.is_initialized():
            self.progress.begin("closing the step")
            self.failures.guarded(self.agreement.meet)
        engine = Engine(self.compiler, self.layout.given_back(), self.virtual, self.state)
        engine.closed = True
        return engine

    def require_usable(self) -> None:
        """Raise StepError once the step is closed, and after a failure that ended it on all ranks."""
        if self.closed:
            raise StepError("this step was closed", do="make a new one")
        if self.failures.broken is not None:
            raise StepError(
                "this step is unusable: an earlier one failed while messages were under way",
                where=f"rank {self.layout.ranks[self.layout.rank]}",
                got=self.failures.broken,
                do="make a new mesh and a new step on all ranks, or start the processes again; the error of that step "
                "says what it has written",
            )

    def _compare(self, intents: Sequence[Intent]) -> Agreed:
        if not self.virtual:
            return self.agreement.compare(intents[0])
        is_new = any(one.is_new for one in intents)
        axes = () if is_new else tuple(intents[0].exchanges)
        apart = (axis for axis in axes if len({one.exchanges[axis].number for one in intents}) > 1)
        ranks = tuple(DataRank(one.contribution, one.microbatches) for one in intents)
        return Agreed(ranks, is_new, next(apart, None))

    def _intent(self, bound: Sequence[Bound], options: Options, key: Key, state: Facts) -> Intent:
        each = [(one.specialisation.number, *one.sizes.values()) for one in bound]
        contents: dict[tuple[int, str], int] = {}
        if self.compiler.plan.check is not None and not self.virtual:
            contents = contents_of(bound)

        def describe() -> str:
            return intent_text(options, bound, state, contents)

        known = self.preparation.known(key)
        own = known.own if known else self.preparation.contribution([one.specialisation for one in bound])
        exchanges = known.exchanges if known else {}
        return Intent(
            options.numbers,
            (*each, *contents.values()),
            describe,
            own.number,
            len(bound),
            known is None,
            {axis: one.at([micro.sizes for micro in bound]) for axis, one in exchanges.items()},
        )

    def _check_meeting(self, intents: Sequence[Intent], agreed: Agreed) -> None:
        """What ranks do together while their pipelines run, they must do in one order. Raises on all of them."""
        ranks = agreed.ranks
        everyone = tuple(range(len(ranks)))
        rules = [("the mesh's axis 'cp'", one, "") for one in self.agreement.grid.data_ranks_along("cp")]
        if self.compiler.plan.regather:
            rules.append(("Plan(regather=True)", everyone, ", or leave `regather` out"))
        for what, members, way_out in rules:
            if len({ranks[i].microbatches for i in members}) > 1:
                error = AgreementError(
                    f"{what} needs as many microbatches on every data rank{' along it' * (members != everyone)}",
                    got=", ".join(f"{ranks[i].microbatches} on data rank {i}" for i in members),
                    do=f"give every data rank the same number{way_out}",
                )
                raise self.agreement.told(error)
        if agreed.apart is not None:
            texts = ["\n".join(one.exchanges[agreed.apart].lines) for one in intents]
            groups = self.agreement.along.get(agreed.apart)
            self.agreement.share(texts[0], None, "take part in the step", groups)
            raise difference(texts, 0, next(i for i, text in enumerate(texts) if text != texts[0]))

    def _compare_contents(self, bound: Sequence[tuple[Bound, ...]]) -> None:
        """Once, at the first step: microbatches drawn on each rank without a common seed are of equal sizes too."""
        text, failure = "", None
        try:
            text = "\n".join(contents_text(contents_of(bound[0])))
        except Exception as error:
            failure = error
        self.agreement.share(text, failure, "compare its microbatches")
        if failure is not None:
            raise failure
        self.compared = True

    def _check_tokens(self, options: Options, prepared: Prepared) -> None:
        known = [loss.name for loss in prepared.total.losses]
        unknown = sorted(set(options.tokens) - set(known))
        if unknown:
            error = StepError(
                f"the step has no loss named {', '.join(map(repr, unknown))}",
                where="step(..., tokens=...)",
                expected=f"names from {', '.join(map(repr, known))}",
                got=", ".join(map(repr, options.tokens)),
                do="give what step.count(microbatches) returns",
            )
            raise self.agreement.told(error)
        # A program takes its denominator in one form, and which number a float on a device is, the host cannot see.
        rounded = [name for name in options.fractions if name not in prepared.total.floating]
        if rounded:
            error = StepError(
                f"the tokens of loss '{rounded[0]}' are counted in whole numbers, so they are given in whole numbers",
                where="step(..., tokens=...)",
                expected="an int, or a 0-dim tensor of integers",
                got="a float",
                do="convert them, for a tensor with .long(); for fractions, give the loss float weights as its tokens",
            )
            raise self.agreement.told(error)

    def run(
        self, step: BoundStep, tokens: Mapping[str, torch.Tensor] | None = None, looking: Looking | None = None
    ) -> Ran:
        """Run it, and write what it yields. tokens: denominators in the place of the step's own counts.

        looking: what to do before it is written, if the step's options say so.

        An error before the closing exchange leaves everything as it was, on all ranks: none comes through that exchange
        unless all have come to it, and what is written behind it has been made ready before.
        """
        try:
            return self.failures.guarded(lambda: self._run(step, tokens, looking or Looking()), self.agreement.known)
        except BaseException:
            for line in step.lines:
                for executor in line.prepared.executors:
                    executor.drop()
            if self.virtual:
                self.preparation.forget()
            raise

    def _run(self, step: BoundStep, tokens: Mapping[str, torch.Tensor] | None, looking: Looking) -> Ran:
        counts, collectives = self._count(step)
        self.progress.doing = "beginning the microbatches"
        if tokens:
            counts = self.counting.replaced(counts, tokens)
        seeds = self._seeds(step)
        executors = [executor for line in step.lines for executor in line.prepared.executors]
        for line in step.lines:
            inputs = self._inputs(line, counts, seeds, step.options.loss_scale)
            for executor in line.prepared.executors:
                executor.begin(inputs)
        results = run_virtual_ranks(executors)
        self.progress.doing = "bringing the results together"
        return self.ending.finish(step, counts, results, collectives, looking)

    def materialize(self, recipe: Recipe) -> None:
        """Give memory and first values to what this rank holds on meta: now, or once the model is cut."""
        work = self.together.look(
            "materialise the model", lambda: self.owned.materialisation(recipe), f"seed={recipe.seed!r}"
        )
        self.preparation.recipe = recipe
        self.together.do("materialising the model", work)
        self.state.refresh()

    def count(self, step: BoundStep) -> Counts:
        """The tokens of a step, over all its data ranks."""
        return self.failures.guarded(lambda: self._count(step)[0])

    def _count(self, step: BoundStep) -> tuple[Counts, int]:
        self.progress.doing = "counting tokens"
        bound = [one for line in step.lines for one in line.bound]
        cuts = [cut for line in step.lines for cut in line.prepared.partitioned]
        return self.counting.count(bound, cuts, step.lines[0].prepared.total)

    def _shared_groups(self) -> Iterator[dist.ProcessGroup]:
        """Those that ranks may wait on besides the layout's."""
        for name in {name for one in self.compiler.specialisations for name in one.joint.groups.values()}:
            yield group_of(name)
        if self.layout.data_mesh is not None and self.preparation.spreading:
            yield self.layout.data_mesh.get_group()

    def _seeds(self, step: BoundStep) -> Sequence[torch.Tensor] | None:
        """One for each microbatch of all data ranks, in their order; drawn by the job's first rank."""
        if not step.lines[0].prepared.total.seeded:
            return None
        count = sum(rank.microbatches for rank in step.ranks)
        return self.agreement.of_the_first(torch.stack(step_seeds(count))).unbind()

    def _inputs(
        self, line: Line, counts: Counts, seeds: Sequence[torch.Tensor] | None, loss_scale: float
    ) -> StepInputs:
        specialisations = {one.specialisation.number: one.specialisation for one in line.bound}.values()
        captured = {name: value for one in specialisations for name, value in one.read_captured().items()}
        parameters, sharded = self.state.parameters(), line.prepared.sharded
        shards: Mapping[str, torch.Tensor] = {}
        if sharded and self.virtual:
            shards = {n: padded_rows(each, parameters[n].detach(), line.data_rank) for n, each in sharded.items()}
        elif sharded:
            shards = self.state.shards()
        return StepInputs(
            microbatches=line.bound,
            parameters=parameters,
            buffers=self.state.buffers(),
            captured=captured,
            denominators=counts.denominators,
            loss_scale=self._scale(loss_scale, line.prepared.scale_dtype),
            shards=shards,
            seeds=None if seeds is None else seeds[line.first : line.first + len(line.bound)],
        )

    def _scale(self, loss_scale: float, dtype: torch.dtype | None) -> torch.Tensor | None:
        """As programs take it, if they do; the latest is kept, for a trainer seldom changes it."""
        if dtype is not None and self._latest_scale[0] != (loss_scale, dtype):
            made = torch.full((), loss_scale, dtype=dtype, device=self.layout.device)
            self._latest_scale = (loss_scale, dtype), made
        return self._latest_scale[1]
