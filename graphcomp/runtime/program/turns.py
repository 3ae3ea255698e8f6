"""Data ranks take turns to update the buffers of a stage: in the order of the reference, which has one after the other.

Each makes its updates of what the one before it has made. One collective a turn gives that to all of them: the buffers
of the stage, as bytes. So what the last turn has made is on every rank in the end, bit by bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from graphcomp.dataparallel.step import DataParallel
from graphcomp.runtime.program.link import StepCall, StepKind

Tensors = Sequence[torch.Tensor]


def turns_of(data: DataParallel, stage: int, rank: int) -> Iterator[tuple[StepKind, tuple[int, ...]]]:
    """The turns that a data rank waits for before it updates the buffers of a stage, then those from its own on."""
    turns = data.turns_on(stage)
    before = tuple(turn for turn in turns if turn < rank) if rank in turns else ()
    if before:
        yield "take", before
    if turns:
        yield "pass", turns[len(before) :]


def process_turns(turns: Sequence[int], rank: int, group: dist.ProcessGroup) -> StepCall:
    """These turns over a process group of the data ranks, of which this process is `rank`."""

    def call(box: list[Any]) -> Tensors:
        values, wire = tuple(box), torch.empty(0)
        box.clear()
        for turn in turns:
            wire = _packed(values) if turn == rank else _empty(values)
            dist.broadcast(wire, group=group, group_src=turn)
        return values if turns[-1] == rank else _unpacked(wire, values)

    return StepCall(call, (), len(turns))


def _in_order(values: Tensors) -> list[int]:
    """Wide elements first, so that each tensor begins at a multiple of its element's size."""
    return sorted(range(len(values)), key=lambda place: -values[place].element_size())


def _packed(values: Tensors) -> torch.Tensor:
    return torch.cat([values[place].contiguous().view(-1).view(torch.uint8) for place in _in_order(values)])


def _empty(values: Tensors) -> torch.Tensor:
    size = sum(value.numel() * value.element_size() for value in values)
    return torch.empty(size, dtype=torch.uint8, device=values[0].device)


def _unpacked(wire: torch.Tensor, like: Tensors) -> Tensors:
    """Tensors of the form of these, strides and all, with memory of their own."""
    found, begin = list(like), 0
    for place in _in_order(like):
        form = like[place]
        size = form.numel() * form.element_size()
        found[place] = torch.empty_like(form).copy_(wire.narrow(0, begin, size).view(form.dtype).view(form.shape))
        begin += size
    return found


@dataclass
class VirtualTurns:
    """The turns of one stage in this process. made: of each turn in the step under way. left: who has the last."""

    turns: Sequence[int]
    ranks: int
    made: dict[int, Tensors] = field(default_factory=dict)
    left: int = 0

    def of(self, turns: Sequence[int], rank: int) -> StepCall:
        def call(box: list[Any]) -> Tensors | None:
            if rank in turns and rank not in self.made:
                self.made[rank] = tuple(box)
            box.clear()
            values = self.made.get(turns[-1])
            if values is not None and turns[-1] == self.turns[-1]:
                self._leave()
            return values

        return StepCall(call, (), len(turns))

    def _leave(self) -> None:
        self.left += 1
        if self.left == self.ranks:
            self.made, self.left = {}, 0
