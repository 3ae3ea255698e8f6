"""What is read out of a microbatch before its step begins."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from graphcomp.ir.interp import Boxed, boxed_callable
from graphcomp.ir.program import Program
from graphcomp.ir.signature import BatchLeaf, Constant, Role, Size


@dataclass(frozen=True)
class Before:
    """program: from the batch alone to the sizes that follow from its contents. Inputs BatchLeaf, Size, Constant."""

    program: Program

    def sizes(self, leaves: Mapping[str, torch.Tensor], sizes: Mapping[str, int]) -> dict[str, int]:
        """All sizes of a microbatch by symbol. leaves: its tensors, by path. sizes: what these show."""
        known: dict[Role, Any] = {Constant(name): tensor for name, tensor in self.program.constants.items()}
        known |= {BatchLeaf(path): leaf for path, leaf in leaves.items()}
        known |= {Size(symbol): number for symbol, number in sizes.items()}
        read = self._call([known[what] for what in self.program.inputs])
        names = (what.symbol for what in self.program.outputs if isinstance(what, Size))
        return {**sizes, **dict(zip(names, read, strict=True))}

    @cached_property
    def _call(self) -> Boxed:
        return boxed_callable(self.program)

    def __getstate__(self) -> dict[str, Any]:
        return {"program": self.program}
