"""What a step hands to process groups, seen below all of our code: by operators, and by gloo itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@dataclass(frozen=True)
class Call:
    """kind: "all_reduce", "all_gather", "reduce_scatter", "send", "recv", "broadcast" or torch's own name."""

    kind: str
    dtype: torch.dtype
    elements: int

    @property
    def nbytes(self) -> int:
        return self.elements * self.dtype.itemsize


KINDS = {
    "allreduce_": "all_reduce",
    "all_reduce_": "all_reduce",  # in place
    "all_gather_into_tensor": "all_gather",
    "_allgather_base_": "host",  # of the agreement before a step, alone
    "reduce_scatter_tensor": "reduce_scatter",
    "recv_": "recv",
}
GLOO = {"reduce_scatter": "all_reduce", "host": "all_gather"}  # what gloo makes of them


class Wire(TorchDispatchMode):
    """Within, notes each call that begins to communicate: the input of a collective, what is sent, what is received."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        if func.namespace in ("c10d", "_c10d_functional") and name != "wait_tensor":
            given = args[1] if name == "_allgather_base_" else args[0]
            tensors = [leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor)]
            elements = sum(tensor.numel() for tensor in tensors)
            self.calls.append(Call(KINDS.get(name, name), tensors[0].dtype, elements))
        return func(*args, **(kwargs or {}))

    def of(self, *kinds: str) -> list[Call]:
        return [call for call in self.calls if call.kind in kinds]

    def places(self, *kinds: str) -> list[int]:
        return [place for place, call in enumerate(self.calls) if call.kind in kinds]


def seen_by_gloo(run: Callable[[], Any]) -> tuple[Wire, Counter[str]]:
    """A run on the wire, and what gloo says that it did, by its own names."""
    with Wire() as wire, profile(activities=[ProfilerActivity.CPU]) as profiled:
        run()
    names = (event.name for event in profiled.events())
    return wire, Counter(name.removeprefix("gloo:") for name in names if name.startswith("gloo:"))


def buckets(sizes: Iterable[int], limit: int) -> int:
    """How many collectives neighbours of these sizes make, joined up to a limit; what reaches it stands alone."""
    count, held = 0, limit
    for size in sizes:
        if size >= limit:
            count += 1
        elif held + size > limit:
            count, held = count + 1, size
        else:
            held += size
    return count
