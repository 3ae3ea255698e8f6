"""What the ranks of a pipeline tell each other once or twice a step, where all of them are on one machine."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from graphcomp.runtime.program.channel import Channel


@dataclass(frozen=True)
class Chain:
    """A rank's place in it: channels to the ranks before and after it in the pipeline; None at the ends.

    Every rank calls the same methods in the same order. Nothing else goes over these channels, so that what a rank says
    in a call that the others do not make is never taken for an activation. Tensors are dense and on CPU, of equal
    shapes on all ranks. Sums go up to the first rank, and from there down again: nobody has a result before all have
    given their part, and all have the same bits.
    """

    place: int
    before: Channel | None
    after: Channel | None
    length: int

    def add(self, vector: torch.Tensor) -> None:
        """Add it up over the ranks, in place."""
        if self.after is not None:
            share = torch.empty_like(vector)
            self.after.post([share]).wait()
            vector += share
        if self.before is not None:
            self.before.send([vector])
            self.before.post([vector]).wait()
        if self.after is not None:
            self.after.send([vector])

    def gather(self, row: torch.Tensor) -> torch.Tensor:
        """The rows of all ranks, in their order."""
        rows = row.new_zeros(self.length, *row.shape)
        rows[self.place] = row
        self.add(rows)
        return rows
