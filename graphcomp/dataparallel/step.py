"""What a step does over data ranks besides its pipeline: which parameters are gathered, which gradients reduced."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from graphcomp.dataparallel.build import step_program
from graphcomp.dataparallel.programs import reduce_program, unshard_program
from graphcomp.dataparallel.spec import Shards, Spec
from graphcomp.ir.program import Program
from graphcomp.partition.stages import Carried, sum_dtype


@dataclass(frozen=True)
class DataParallel:
    """The same on all ranks of a job.

    ranks: the number of data ranks. specs: every parameter, by name. homes: the stages that hold each of them.
    sharded: those of which every data rank holds some rows. reduced: those that some data rank has a gradient for, in
    this order. regather: gather parameters for every action instead of once a step. axis: what programs call
    the data ranks. buffers: every buffer, by name. updated: for each data rank, those that its microbatches change.
    pipeline_ranks: how many ranks hold the stages, stage s is on rank s % that; None: each is on a rank of its own.
    """

    ranks: int
    specs: Mapping[str, Spec]
    homes: Mapping[str, tuple[int, ...]]
    sharded: Mapping[str, Shards]
    reduced: tuple[str, ...]
    regather: bool = False
    bucket_bytes: int = 4 * 2**20
    accumulate_dtype: torch.dtype | None = None
    axis: str = "dp"
    buffers: Mapping[str, Spec] = field(default_factory=dict)
    updated: tuple[tuple[str, ...], ...] = ()
    pipeline_ranks: int | None = None

    def gathered_on(self, stage: int) -> tuple[str, ...]:
        """The sharded parameters that are gathered for a stage, in the model's order.

        Once a step, a parameter is gathered for the lowest stage of a rank that holds it, and there for the others.
        """
        return tuple(name for name in self.sharded if stage in self.homes.get(name, ()) and self._first(name, stage))

    def _first(self, name: str, stage: int) -> bool:
        """Whether no lower stage of the same rank keeps this parameter gathered."""
        if self.regather or self.pipeline_ranks is None:
            return True
        return not any((stage - home) % self.pipeline_ranks == 0 for home in self.homes[name] if home < stage)

    def reduced_on(self, stage: int) -> tuple[str, ...]:
        """The gradients that a stage reduces: of its parameters, but for those that a lower stage holds as well."""
        names = [name for name in self.reduced if self.homes.get(name, (None,))[0] == stage]
        return tuple(sorted(names, key=lambda name: name in self.sharded))  # replicated ones first

    def updated_on(self, stage: int) -> tuple[str, ...]:
        """The buffers of a stage that some data rank changes, in the model's order."""
        names = {name for each in self.updated for name in each if stage in self.homes.get(name, ())}
        return tuple(name for name in self.buffers if name in names)

    def turns_on(self, stage: int) -> tuple[int, ...]:
        """The data ranks that change buffers of a stage, ascending: one after the other, in this order."""
        names = set(self.updated_on(stage))
        return tuple(rank for rank, each in enumerate(self.updated) if not names.isdisjoint(each))

    def unshard_program(self, stage: int) -> Program | None:
        """Inputs Shard, outputs Param, in the order of `gathered_on`; None if there is nothing to gather."""
        shards = [self.sharded[name] for name in self.gathered_on(stage)]
        return step_program(unshard_program(stage, shards, self.axis), self.bucket_bytes) if shards else None

    def reduce_program(self, stage: int) -> Program | None:
        """Inputs and outputs Grad, in the order of `reduced_on`; None if there is nothing to reduce."""
        names = self.reduced_on(stage)
        if not names:
            return None
        plain = [self.gradient(name) for name in names if name not in self.sharded]
        rows = [replace(self.sharded[name], spec=self.gradient(name)) for name in names if name in self.sharded]
        return step_program(reduce_program(stage, plain, rows, self.ranks, self.axis), self.bucket_bytes)

    def gradient(self, name: str) -> Spec:
        """The accumulated gradient of a parameter."""
        spec = self.specs[name]
        return replace(spec, dtype=sum_dtype(spec.dtype, self.accumulate_dtype))

    def carried(self, name: str, reduced: bool = False) -> Carried:
        """A gradient as a message between stages, before it is reduced or after."""
        spec = self.gradient(name)
        shape = self.sharded[name].padded if reduced and name in self.sharded else spec.shape
        return Carried(name, spec.dtype, spec.device, tuple(shape))
