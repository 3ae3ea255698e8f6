"""What is measured over data ranks: contests of graphcomp with a peer, called in each process with its rank."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from data_memory import held_and_peak
from data_systems import Contestant, Graphcomp, Replicated, Sharded
from measure import paired
from models import Config
from rich.console import Console
from systems import IGNORED, Batches

CONFIG = Config(layers=4)
MICROBATCHES, ROWS, LENGTH = 4, 2, 128


@dataclass(frozen=True)
class Contest:
    """Contestants by name, graphcomp first and the eager peer second."""

    title: str
    contestants: Mapping[str, Callable[[], Contestant]]


CONTESTS = {
    "replicate": Contest(
        "parameters replicated; the peer: DistributedDataParallel, no_sync",
        {
            "graphcomp": lambda: Graphcomp(CONFIG, "replicate"),
            "peer, eager": lambda: Replicated(CONFIG, compiled=False),
            "peer, compiled": lambda: Replicated(CONFIG, compiled=True),
        },
    ),
    "shard": Contest(
        "parameters sharded, gathered once a step; the peer: fully_shard, resharded and reduced in the last backward",
        {
            "graphcomp": lambda: Graphcomp(CONFIG, "shard"),
            "peer, eager": lambda: Sharded(CONFIG, compiled=False, regather=False),
            "peer, compiled": lambda: Sharded(CONFIG, compiled=True, regather=False),
        },
    ),
    "overlap": Contest(
        "parameters replicated, four stages on each rank, reduced beside the backward of the stages before",
        {
            "graphcomp": lambda: Graphcomp(CONFIG, "replicate", stages=4, schedule="gpipe"),
            "peer, eager": lambda: Replicated(CONFIG, compiled=False),
            "graphcomp, one stage": lambda: Graphcomp(CONFIG, "replicate"),
        },
    ),
    "regather": Contest(
        "parameters sharded, gathered for every forward and backward; the peer: fully_shard, reduced in the last",
        {
            "graphcomp": lambda: Graphcomp(CONFIG, "shard", regather=True),
            "peer, eager": lambda: Sharded(CONFIG, compiled=False, regather=True),
            "peer, compiled": lambda: Sharded(CONFIG, compiled=True, regather=True),
        },
    ),
}


def data(rank: int, rows: int = ROWS, length: int = LENGTH) -> Batches:
    """One step's microbatches of a data rank: of one shape, as the peers' compiler likes it, and of unequal counts."""
    draw = torch.Generator().manual_seed(rank)
    batches = []
    for _ in range(MICROBATCHES):
        ids = torch.randint(CONFIG.vocabulary, (rows, length), generator=draw)
        valid = torch.randint(1, length, (rows, 1), generator=draw)
        batches.append({"ids": ids, "labels": ids.roll(-1, 1).masked_fill(torch.arange(length) >= valid, IGNORED)})
    return batches


def timing(rank: int, name: str, repeats: int) -> dict[str, Any]:
    """Step time and processor time of every contestant, in alternation, and how far their gradients are apart."""
    batches, console = data(rank), Console(quiet=rank != 0, stderr=True)
    runs: dict[str, Callable[[], torch.Tensor]] = {}
    ready: dict[str, float] = {}
    gradients: dict[str, dict[str, torch.Tensor]] = {}
    with console.status("") as status:
        for label, make in CONTESTS[name].contestants.items():
            status.update(f"({name}) {label}: building and compiling")
            begin = time.perf_counter()
            contestant = make()
            runs[label] = lambda contestant=contestant: contestant.run(batches)  # type: ignore[misc]
            runs[label]()
            ready[label] = time.perf_counter() - begin
            gradients[label] = contestant.gradients()
            for _ in range(2):
                runs[label]()
        seconds, busy = paired(runs, repeats, 1, lambda text: status.update(f"({name}) {text}"))
    return {
        "seconds": seconds,
        "busy": busy,
        "first step": ready,
        "difference": _difference(gradients),
        "tokens": sum(int((batch["labels"] != IGNORED).sum()) for batch in batches),
        "parameters": sum(gradient.nbytes for gradient in gradients["peer, eager"].values()),
    }


def memory(rank: int, name: str, label: str) -> tuple[int, int]:
    """(held, peak) bytes of one contestant, on microbatches of 16 tokens; in a process that has had no other."""
    batches = data(rank, rows=1, length=16)
    small = replace(CONFIG, width=32, layers=1)
    held_and_peak(lambda: Replicated(small, compiled=False), batches)  # what the process itself needs comes first
    return held_and_peak(CONTESTS[name].contestants[label], batches)


def _difference(gradients: Mapping[str, Mapping[str, torch.Tensor]]) -> float:
    """The largest relative difference of any gradient from the eager peer's."""
    expected = gradients["peer, eager"]
    return max(
        float((found[name] - gradient).norm() / gradient.norm())
        for found in gradients.values()
        for name, gradient in expected.items()
    )
