"""The model's own outputs of a step: rebuilt in its own type, here or on every rank of the pipeline."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from graphcomp.compat.symbols import expression
from graphcomp.ir import meta
from graphcomp.ir.signature import Output
from graphcomp.ir.sizes import evaluator
from graphcomp.partition import Partitioned
from graphcomp.runtime.program.executor import RankResult
from graphcomp.runtime.program.transport import payload
from graphcomp.runtime.ranks.layout import Layout
from graphcomp.runtime.results.result import rebuild_output


def collect_outputs(
    partitioned: Sequence[Partitioned],
    sizes: Sequence[Mapping[str, int]],
    results: Sequence[RankResult],
    layout: Layout,
    group: dist.ProcessGroup | None,
    buffers: Iterable[torch.Tensor] = (),
) -> tuple[tuple[Any, ...], int]:
    """One output a microbatch, and the number of collectives used.

    group: where to send them to all ranks (one broadcast a tensor, its shape computed on each side); None: each leaf
    is there only if a rank of this process computed it.
    buffers: those of the model. An output that is one of them is copied, for the end of a step writes to them.
    """
    memory = {buffer.untyped_storage().data_ptr() for buffer in buffers}

    def lasting(value: torch.Tensor) -> torch.Tensor:
        return value.clone() if value.untyped_storage().data_ptr() in memory else value

    found: list[dict[str, torch.Tensor | None]] = [{} for _ in partitioned]
    for result in results:
        for microbatch, own in enumerate(result.recorded(Output)):
            found[microbatch].update((path, lasting(value)) for path, value in own.items())
    sent = 0
    if group is not None:
        for cut, own_sizes, values in zip(partitioned, sizes, found, strict=True):
            for path, (stage, node) in _owners(cut).items():
                value: torch.Tensor | None = values.get(path)
                if value is None:
                    value = _empty(node, cut, own_sizes, layout.device)
                # A non-dense value travels, and stays on every rank, as a dense copy.
                values[path] = value = value.contiguous()
                dist.broadcast(payload(value), layout.ranks[layout.places[stage]], group=group)
                sent += 1
    each = zip(partitioned, found, sizes, strict=True)
    return tuple(rebuild_output(cut.joint, values, own_sizes) for cut, values, own_sizes in each), sent


def _owners(cut: Partitioned) -> dict[str, tuple[int, Any]]:
    return {
        what.path: (stage.index, node)
        for stage in cut.stages
        for what, node in stage.forward.output_items()
        if isinstance(what, Output)
    }


def _empty(node: Any, cut: Partitioned, sizes: Mapping[str, int], device: torch.device) -> torch.Tensor:
    like = meta.tensor(node)
    if like is None:
        raise TypeError(f"output {node} is no tensor")
    mode = cut.joint.program.fake_mode
    shape = evaluator([expression(mode, size) for size in like.shape], list(sizes))(*sizes.values())
    return torch.empty(shape, dtype=like.dtype, device=device)
