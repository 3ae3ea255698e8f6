"""Parameters of several shapes, and step programs of theirs run on all data ranks at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from graphcomp.compat.dispatch import Watch
from graphcomp.dataparallel.spec import Shards, Spec
from graphcomp.ir.lockstep import lockstep
from graphcomp.ir.program import Program

SHAPES = {
    "embed.weight": (11, 3),  # rows divide among no number of ranks
    "fc.weight": (12, 2),  # among all
    "fc.bias": (1,),  # one row: all but one rank have none
    "conv.weight": (5, 2, 3, 1),
    "empty": (0, 4),
    "hollow": (4, 0),
    "norm.weight": (8,),
}


def spec(name: str, *shape: int, dtype: torch.dtype = torch.float64) -> Spec:
    return Spec(name, shape, dtype, "cpu")


def specs(dtype: torch.dtype = torch.float64) -> list[Spec]:
    return [spec(name, *shape, dtype=dtype) for name, shape in SHAPES.items()]


def sharded(ranks: int, dtype: torch.dtype = torch.float64) -> list[Shards]:
    return [Shards(each, ranks) for each in specs(dtype)]


def random(spec: Spec) -> Tensor:
    return torch.randn(spec.shape, dtype=torch.float64).to(spec.dtype)


def rows(whole: Tensor, of: Shards, rank: int) -> Tensor:
    """The rows of a rank, zeros behind them, by torch's own chunking."""
    parts = whole.chunk(of.ranks)
    padded = torch.zeros(of.padded, dtype=whole.dtype)
    if rank < len(parts):
        padded[: len(parts[rank])] = parts[rank]
    return padded


def run_all(program: Program, inputs: Sequence[Sequence[Tensor]]) -> list[tuple[Tensor, ...]]:
    return lockstep(program, "dp", [list(box) for box in inputs])


class Bytes:
    """Counts the memory behind tensors: that of `given`, and of whatever is computed within `watch()`."""

    def __init__(self, given: Sequence[Tensor] = ()) -> None:
        self._seen: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0
        for tensor in given:
            self._add(tensor)

    def watch(self) -> Watch:
        return Watch(lambda operator, result: self._add(result))

    def now(self) -> int:
        self._seen = {key: entry for key, entry in self._seen.items() if not entry[0].expired()}
        return sum(size for _, size in self._seen.values())

    def _add(self, result: object) -> None:
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                reference = StorageWeakRef(storage)
                self._seen[reference.cdata] = reference, storage.nbytes()
        self.peak = max(self.peak, self.now())
