"""Prepare a step: agree on the cut, compile, lower and link what its microbatches need. All ranks do this together."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from graphcomp.compat.tensor_parallel import part_shape, placed
from graphcomp.compiler import GraphCompiler, RankPrograms, Specialisation
from graphcomp.dataparallel.contribution import Contribution, combine, contribution
from graphcomp.dataparallel.spec import Shards, Spec
from graphcomp.dataparallel.step import DataParallel
from graphcomp.ir import meta
from graphcomp.ir import signature as role
from graphcomp.owned import Owned
from graphcomp.partition import Partitioned
from graphcomp.runtime.program.executor import RankExecutor
from graphcomp.runtime.program.fingerprint import CheckedTransport, Steps
from graphcomp.runtime.program.link import Callables, StepCalls
from graphcomp.runtime.program.lower import distinct
from graphcomp.runtime.program.step_calls import process_calls, virtual_calls
from graphcomp.runtime.program.transport import ProcessTransport, Transport, VirtualNetwork, VirtualTransport
from graphcomp.runtime.ranks.agreement import Agreement, DataRank
from graphcomp.runtime.ranks.exchanges import Exchanges, exchanges
from graphcomp.runtime.ranks.layout import Layout
from graphcomp.runtime.ranks.tensor_ranks import values_text
from graphcomp.runtime.results.closing import Closing, Packing
from graphcomp.runtime.state.initial import Recipe
from graphcomp.runtime.state.live import LiveState
from graphcomp.runtime.state.replicas import copy_from_first
from graphcomp.runtime.state.shards import shard_parameters, sharding_text

KEPT = 64
"""Sequences of specialisations whose rank programs are kept; the oldest goes first. Compiled code is kept apart."""


@dataclass(frozen=True)
class Prepared:
    """What one pipeline needs for a sequence of specialisations. executors: one for each of its ranks in this process.

    packings: for each of them, how the values that it records become its vector of the closing exchange. total: what
    all data ranks together add up. data: what is done over data ranks; None with only one. scale_dtype: of the loss
    scale; None where no program takes it.
    """

    partitioned: tuple[Partitioned, ...]
    programs: RankPrograms
    executors: tuple[RankExecutor, ...]
    closing: Closing
    packings: tuple[Packing, ...]
    total: Contribution
    data: DataParallel | None
    scale_dtype: torch.dtype | None

    @property
    def sharded(self) -> Mapping[str, Shards]:
        return {} if self.data is None else self.data.sharded


@dataclass(frozen=True)
class Compiled:
    """What has been agreed on and compiled for a sequence of specialisations; data ranks not considered.

    exchanges: by axis, what this rank does with the others along it while its pipeline runs.
    """

    specialisations: tuple[Specialisation, ...]
    partitioned: tuple[Partitioned, ...]
    programs: RankPrograms
    callables: Callables
    own: Contribution
    exchanges: Mapping[str, Exchanges]


Key = tuple[tuple[int, ...], bool]
"""The numbers of the specialisations, one a microbatch, and whether outputs are kept."""


def key_of(specialisations: Sequence[Specialisation], outputs: bool) -> Key:
    return tuple(one.number for one in specialisations), outputs


class Preparation:
    """Prepares steps of the pipelines in this process: of one, or, virtually, of all data ranks."""

    def __init__(self, compiler: GraphCompiler, layout: Layout, virtual: bool, state: LiveState, owned: Owned) -> None:
        self.compiler, self.layout, self.virtual, self.state, self.owned = compiler, layout, virtual, state, owned
        self.agreement = Agreement(layout)
        self._compiled: dict[Key, Compiled] = {}
        self._linked: dict[object, tuple[Prepared, ...]] = {}
        self._step_calls: dict[object, tuple[DataParallel | None, Sequence[StepCalls]]] = {}
        self._contributions: dict[int, Contribution] = {}
        self._homes: Mapping[str, tuple[int, ...]] = {}
        self._steps = Steps()
        self._spread = self._begun = False
        self.recipe: Recipe | None = None
        """How to initialise what this rank comes to hold and has on meta."""
        self.spreading = False
        """Whether data ranks are being given their parameters, over the mesh's own group."""

    def contribution(self, specialisations: Sequence[Specialisation]) -> Contribution:
        found = contribution({one.number: one.joint for one in specialisations}.values())
        return self._contributions.setdefault(found.number, found)

    def known(self, key: Key) -> Compiled | None:
        """What all ranks have prepared for these microbatches; None if that is new."""
        return self._compiled.get(key)

    def forget(self) -> None:
        """Drop what was linked: after a step of virtual ranks that failed half way."""
        self._linked.clear()
        self._step_calls.clear()

    def compile(self, lines: Sequence[Sequence[Specialisation]], outputs: bool) -> None:
        """Cut and compile these sequences, one for each pipeline in this process. All ranks call it at the same step.

        Raises what went wrong here, or RankFailure for what went wrong elsewhere; then nothing has changed.
        """
        one_of_each = {one.number: one for line in lines for one in line}
        grid = self.agreement.grid
        self.agreement.share(_model_text(self.compiler.model), None, "", grid.everyone)
        if self.layout.side is not None:
            # Tensor ranks hold different parts; what they do together is compared before every step.
            own = f"tensor rank {self.layout.tensor_rank}: "
            named = {own + one.kind: one for one in one_of_each.values()}
            texts = {name: one.text_to_compare for name, one in named.items()}
            self.agreement.alike(texts, {name: one.modes for name, one in named.items()})
        homes = self._agree_on_homes(list(one_of_each.values()), outputs)
        failure: Exception | None = None
        made: dict[Key, Compiled] = {}
        wire, to_shard, materialize = "", "", _nothing
        try:
            for line in lines:
                made[key_of(line, outputs)] = self._compile(line, outputs)
            if self.recipe is not None:
                materialize = self.owned.materialisation(self.recipe)
            wire = "\n".join(map(_wire_text, made.values()))
            if self._shards and self.layout.data_mesh is not None and not self._spread:
                to_shard = sharding_text(self.compiler.model, self.layout.data_mesh)
        except Exception as error:
            failure = error
        # Copies: what is compiled of them cannot be sent.
        sizes = {number: replace(one.joint.sizes) for number, one in one_of_each.items()}
        contributions = [one.own for one in made.values()]
        shared = self.agreement.share(wire, failure, "prepare the step", grid.pipelines, more=(sizes, contributions))
        if failure is not None:
            raise failure
        if self.layout.tensor is not None and not self._begun:
            where = f"data rank {self.layout.data_rank}, {self.layout.own_text}"
            self.agreement.alike({where: values_text(self.compiler.model)})
        place = f"{self.layout.own_text}, tensor rank {self.layout.tensor_rank}"
        self.agreement.alike({f"parameters of {place}": to_shard})
        for theirs, _ in shared[self.layout.data_rank if len(shared) > 1 else 0]:
            for number, one in one_of_each.items():
                self.compiler.add_conditions(one, one.joint.sizes.conditions_of(theirs[number]))
        for members in shared:
            for _, contribution_of_each in members:
                self._contributions |= {one.number: one for one in contribution_of_each}
        if self.layout.data_mesh is not None and not self._spread:
            self.spreading = True
            model, mesh = self.compiler.model, self.layout.data_mesh
            if self._shards:
                shard_parameters(model, mesh)
            else:
                copy_from_first(model.parameters(), mesh)
            copy_from_first(model.buffers(), mesh)
            self.spreading, self._spread = False, True
        materialize()
        for key, compiled in made.items():
            while len(self._compiled) >= KEPT:
                del self._compiled[next(iter(self._compiled))]
            self._compiled[key] = compiled
        self._homes, self._begun = homes, True
        self.state.refresh()

    @property
    def _shards(self) -> bool:
        return self.compiler.plan.parameters == "shard"

    def _agree_on_homes(
        self, specialisations: Sequence[Specialisation], outputs: bool
    ) -> Mapping[str, tuple[int, ...]]:
        """Cut them, alike on all data ranks: what the first one to use a parameter says about it, the others follow."""
        homes = self._homes
        while True:
            failure: Exception | None = None
            try:
                self.compiler.follow(homes, specialisations, outputs)
            except Exception as error:
                failure = error
            shared = self.agreement.share("", failure, "cut the step", more=dict(self.compiler.homes))
            if failure is not None:
                raise failure
            found = [each for members in shared for each in members]
            new = next((one for one in found if one.keys() - homes.keys()), homes)
            homes = {**new, **homes}
            if all(one == homes for one in found):
                return homes

    def _compile(self, line: Sequence[Specialisation], outputs: bool) -> Compiled:
        partitioned = tuple(self.compiler.partition(one, outputs=outputs) for one in line)
        programs = self.compiler.lower(partitioned, outputs=outputs, rank=self._rank)
        callables = self.compiler.compile(programs, line, outputs=outputs)
        actions = [action for program in programs.ranks for action in programs.schedule.ranks[program.rank]]
        regather = self.layout.data_axis if self.compiler.plan.regather else None
        together = {
            axis: exchanges(actions, partitioned, axis == regather, peers, formulas=axis != "tp")
            for axis, peers in self.layout.peers.items()
        }
        return Compiled(tuple(line), partitioned, programs, callables, self.contribution(line), together)

    @property
    def _rank(self) -> int | None:
        return None if self.virtual else self.layout.rank

    def link(self, lines: Sequence[Key], ranks: Sequence[DataRank]) -> tuple[Prepared, ...]:
        """What the pipelines in this process need, next to what all data ranks do. Needs no agreement: it follows."""
        everyone = tuple(rank.contribution for rank in ranks)
        key = (tuple(lines), everyone, len(self.compiler.homes))
        found = self._linked.get(key)
        if found is None:
            total = combine([self._contributions[number] for number in everyone])
            updated = tuple(self._contributions[number].updated for number in everyone)
            data, calls = self._step_programs(total, updated, len(lines))
            first = 0 if self.virtual else self.layout.data_rank
            each = zip(itertools.count(first), lines, calls, strict=False)
            found = tuple(self._line(self._compiled[line], line[1], total, data, own, at) for at, line, own in each)
            while len(self._linked) >= KEPT:
                del self._linked[next(iter(self._linked))]
            self._linked[key] = found
        return found

    def _step_programs(
        self, total: Contribution, updated: tuple[tuple[str, ...], ...], lines: int
    ) -> tuple[DataParallel | None, Sequence[StepCalls]]:
        """What is done once a step, for each pipeline of this process: the same whatever its microbatches are.

        updated: the buffers that each data rank changes.
        """
        key = (total.gradients, updated, len(self.compiler.homes))
        if key not in self._step_calls:
            data = self._data(total, updated)
            self._step_calls[key] = data, self._make_step_calls(data, lines)
        return self._step_calls[key]

    def _make_step_calls(self, data: DataParallel | None, lines: int) -> Sequence[StepCalls]:
        stages = range(self.compiler.plan.stage_count)
        calls: list[StepCalls] = [{}] * lines
        if data is not None and self.virtual:
            calls = virtual_calls(data, stages)
        elif data is not None and self.layout.data is not None:
            calls = [process_calls(data, self.layout.own_stages, self.layout.data.group_name)]
        return calls

    def _line(
        self,
        one: Compiled,
        outputs: bool,
        total: Contribution,
        data: DataParallel | None,
        calls: StepCalls,
        data_rank: int,
    ) -> Prepared:
        programs = one.programs
        if data is not None:
            lower = self.compiler.lower
            programs = lower(one.partitioned, outputs=outputs, rank=self._rank, data=data, data_rank=data_rank)
        network = VirtualNetwork()
        executors = tuple(
            RankExecutor(
                program,
                distinct(one.partitioned),
                one.callables,
                self._transport(network),
                self.layout.device,
                self.compiler.plan.accumulate_dtype,
                calls,
                None if self.virtual else self.layout.ranks[self.layout.rank],
                self.compiler.plan.check_finite,
            )
            for program in programs.ranks
        )
        closing = Closing(one.partitioned, self.layout.device, total.losses, total.metrics)
        packings = tuple(closing.packing(program.records, program.stages) for program in programs.ranks)
        scale = _scale_dtype(one.partitioned)
        return Prepared(one.partitioned, programs, executors, closing, packings, total, data, scale)

    def _data(self, total: Contribution, updated: tuple[tuple[str, ...], ...]) -> DataParallel | None:
        if self.layout.data_ranks == 1:
            return None
        plan, ranks = self.compiler.plan, self.layout.data_ranks
        specs = {
            name: Spec(name, part_shape(parameter), parameter.dtype, self.layout.device.type)
            for name, parameter in self.compiler.model.named_parameters()
        }
        sharded = {n: Shards(spec, ranks) for n, spec in specs.items() if plan.parameters == "shard" and spec.shape}
        return DataParallel(
            ranks,
            specs,
            self.compiler.homes,
            sharded,
            total.gradients,
            plan.regather,
            plan.bucket_bytes,
            plan.accumulate_dtype,
            self.layout.data_axis,
            {
                name: Spec(name, tuple(buffer.shape), buffer.dtype, self.layout.device.type)
                for name, buffer in self.state.buffers().items()
            },
            updated,
            plan.pipeline_ranks,
        )

    def _transport(self, network: VirtualNetwork) -> Transport:
        layout = self.layout
        if self.virtual or layout.down is None or layout.up is None:
            return VirtualTransport(network)
        back = None if layout.down_back is None or layout.up_back is None else (layout.down_back, layout.up_back)
        transport = ProcessTransport((layout.down, layout.up), layout.places, back, layout.channels)
        if self.compiler.plan.check is None or layout.side is None:
            return transport
        return CheckedTransport(transport, layout.side, [layout.ranks[rank] for rank in layout.places], self._steps)


def _scale_dtype(partitioned: Sequence[Partitioned]) -> torch.dtype | None:
    """Of the loss scale that programs take, if one does."""
    for cut in distinct(partitioned):
        for what, node in cut.joint.program.input_nodes():
            found = meta.tensor(node) if isinstance(what, role.LossScale) else None
            if found is not None:
                return found.dtype
    return None


def _nothing() -> None:
    pass


def _model_text(model: nn.Module) -> str:
    """What all ranks must have in common from the start."""
    found = [
        f"parameter '{name}' {tuple(p.shape)} {p.dtype}, requires_grad={p.requires_grad} {placed(p)}".rstrip()
        for name, p in model.named_parameters()
    ]
    found += [f"buffer '{name}' {tuple(b.shape)} {b.dtype} {placed(b)}".rstrip() for name, b in model.named_buffers()]
    return "\n".join(found)


def _wire_text(one: Compiled) -> str:
    """What goes over the wire in a step, as text: the schedule, and each boundary's values."""
    lines = [one.programs.schedule.text()]
    for number, cut in enumerate(distinct(one.partitioned)):
        for boundary in (*cut.forward_boundaries.values(), *cut.backward_boundaries.values()):
            for value in boundary.values:
                shape = ", ".join(map(str, value.shape))
                lines.append(
                    f"specialisation {number}: {boundary.source}>{boundary.target} {value.name} {value.dtype} [{shape}]"
                )
        lines += [f"losses {cut.joint.losses}", f"metrics {cut.joint.metrics}"]
        lines += [f"parameter {name}: stages {stages}" for name, stages in cut.parameter_stages.items()]
    return "\n".join(lines)
