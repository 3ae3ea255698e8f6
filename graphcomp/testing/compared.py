"""What a parity check compares with its reference: a step of this process, or one of virtual ranks."""

from __future__ import annotations

import contextlib
import io
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.serialization import default_restore_location

from graphcomp.capture import Joint
from graphcomp.compat.tracing import swapped_state
from graphcomp.compiler import GraphCompiler
from graphcomp.dispatch import as_microbatches
from graphcomp.runtime.results.result import StepResult
from graphcomp.step import CompiledStep
from graphcomp.testing.virtual import VirtualStep


@dataclass(frozen=True)
class Found:
    """What a step gave. gradients: of what this process owns. first, joint: its first microbatch, and the program."""

    result: StepResult
    gradients: Mapping[str, torch.Tensor | None]
    first: Any
    joint: Joint


class Compared(ABC):
    """lines: the microbatches of every data rank, in their order."""

    compiler: GraphCompiler
    lines: list[list[Any]]

    @abstractmethod
    def run(self) -> Found:
        """One step. All ranks must call it."""

    def agreed(self, seeds: torch.Tensor) -> torch.Tensor:
        """The seeds that the step uses where this rank has drawn these. All ranks must call it."""
        return seeds

    def whole(self) -> contextlib.AbstractContextManager[None]:
        """Within, the model can be called, for it has whole parameters in the place of sharded ones."""
        return contextlib.nullcontext()


class Virtual(Compared):
    def __init__(self, step: VirtualStep, microbatches: Sequence[Any]) -> None:
        self.step, self.own, self.compiler = step, microbatches, step.compiler
        self.lines = [as_microbatches(line) for line in (microbatches if step.data_ranks > 1 else [microbatches])]

    def run(self) -> Found:
        ran = self.step.run(self.own)
        trainable = [name for name, parameter in self.step.model.named_parameters() if parameter.requires_grad]
        gradients = {name: ran.gradients.get(name) for name in trainable}
        return Found(ran.result, gradients, self.lines[0][0], self.step.latest[0].specialisation.joint)


class Process(Compared):
    """This rank's part of a step. What the reference needs of other data ranks is fetched from them, on the host."""

    def __init__(self, step: CompiledStep, microbatches: Sequence[Any]) -> None:
        self.step, self.compiler, self.layout = step, step.compiler, step.layout
        self.own = as_microbatches(microbatches)
        if self.layout.data_ranks > 1:
            step.compile(self.own[0])  # what data ranks make equal, or shard, they do so now
        # Fetched now, for all ranks have to take part; a difference is looked into by the rank that has found it.
        self.wholes = {n: _whole(p) for n, p in step.model.named_parameters() if isinstance(p, DTensor)}
        self.lines = self._lines()

    def run(self) -> Found:
        result = self.step(self.own)
        gradients = {name: p.grad for name, p in self.step.named_parameters() if p.requires_grad}
        return Found(result, gradients, self.own[0], self.step.latest[0].joint)

    def agreed(self, seeds: torch.Tensor) -> torch.Tensor:
        if self.layout.side is not None:
            dist.broadcast(seeds, group=self.layout.side, group_src=0)
        return seeds

    def whole(self) -> contextlib.AbstractContextManager[None]:
        return swapped_state(self.step.model, self.wholes) if self.wholes else contextlib.nullcontext()

    def _lines(self) -> list[list[Any]]:
        if self.layout.data_ranks == 1 or self.layout.grid is None:
            return [self.own]
        file = io.BytesIO()
        torch.save(self.own, file)
        everyone: list[Any] = [None] * dist.get_world_size(self.layout.side)
        dist.all_gather_object(everyone, file.getvalue(), group=self.layout.side)
        given = [everyone[members[0]] for members in self.layout.grid.lines]
        found = [self._read(each) for each in given]
        found[self.layout.data_rank] = self.own
        return found

    def _read(self, given: bytes) -> Any:
        """Saved microbatches of another rank; what was on its device comes to this rank's."""

        def place(storage: Any, where: str) -> Any:
            return default_restore_location(storage, "cpu" if where == "cpu" else str(self.layout.device))

        return torch.load(io.BytesIO(given), map_location=place, weights_only=False)


def _whole(parameter: DTensor) -> nn.Parameter:
    return nn.Parameter(parameter.full_tensor().detach(), parameter.requires_grad)
