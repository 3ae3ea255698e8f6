"""What is measured: one function a case, called in each process with its rank."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from measure import paired, peak_bytes
from models import Config
from rich.console import Console
from systems import IGNORED, Batches, Graphcomp, Peer


@dataclass(frozen=True)
class Case:
    """lengths: None for `length` everywhere; else (median, spread) of a log-normal between 16 and `length`.
    variants: what graphcomp is given besides 1F1B, which is the peer's, by name: options of a plan. cpp_wrapper: both
    sides also with Inductor's code around its kernels in C++."""

    name: str
    title: str
    config: Config
    rows: int
    microbatches: int
    length: int
    steps: int
    lengths: tuple[float, float] | None = None
    variants: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    cpp_wrapper: bool = False


CASES = {
    "a": Case(
        "a",
        "width 256, 8 layers, 2 x 256 tokens, 8 microbatches",
        Config(),
        2,
        8,
        256,
        steps=1,
        variants={
            "interleaved-1f1b": {"schedule": "interleaved-1f1b", "stages": 4},
            "hand cut": {"split": ["blocks.4"]},
        },
    ),
    "b": Case(
        "b",
        "width 32, 1 x 16 tokens, 32 microbatches",
        Config(width=32, longest=16),
        1,
        32,
        16,
        steps=4,
        variants={"eager-1f1b": {"schedule": "eager-1f1b"}},
        cpp_wrapper=True,
    ),
    "c": Case("c", "as (a), lengths log-normal between 16 and 512", Config(), 2, 8, 512, steps=2, lengths=(96, 0.8)),
}


def data(case: Case, seed: int) -> Batches:
    """One step's microbatches; the rows of a microbatch are padded to its longest."""
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    batches = []
    for _ in range(case.microbatches):
        lengths = [case.length] * case.rows
        if case.lengths:
            median, spread = case.lengths
            drawn = (median * draw.lognormvariate(0.0, spread) for _ in range(case.rows))
            lengths = [int(min(max(16, number), case.length)) for number in drawn]
        ids = torch.randint(case.config.vocabulary, (case.rows, max(lengths)), generator=generator)
        labels = ids.roll(-1, 1)
        for row, length in enumerate(lengths):
            labels[row, length - 1 :] = IGNORED
        batches.append({"ids": ids, "labels": labels})
    return batches


def pipeline(rank: int, name: str, repeats: int) -> dict[str, Any]:
    """Run one case; the same on both ranks, results of rank 0's clock."""
    case, console = CASES[name], Console(quiet=rank != 0, stderr=True)
    steps = [data(case, seed) for seed in range(case.steps)]
    contestants: dict[str, Any] = {}
    ready: dict[str, float] = {}
    runs: dict[str, Callable[[], torch.Tensor]] = {}
    peer = partial(Peer, case.config, case.microbatches, case.length)
    makers: dict[str, Callable[[], Any]] = {
        "graphcomp": lambda: Graphcomp(case.config),
        **{
            f"graphcomp, {other}": partial(Graphcomp, case.config, **options)
            for other, options in case.variants.items()
        },
        "peer, eager": partial(peer, None),
        "peer, compiled": partial(peer, {}),
    }
    if case.cpp_wrapper:
        options = {"cpp_wrapper": True}
        makers["graphcomp, C++ wrapper"] = lambda: Graphcomp(case.config, compile_options=options)
        makers["peer, compiled, C++ wrapper"] = partial(peer, options)
    gradients: dict[str, dict[str, torch.Tensor]] = {}
    with console.status("") as status:
        for label, maker in makers.items():
            status.update(f"({name}) {label}: building and compiling")
            begin = time.perf_counter()
            each = contestants[label] = maker()
            runs[label] = _cycle(each, steps)
            runs[label]()
            ready[label] = time.perf_counter() - begin
            gradients[label] = {n: g.clone() for n, g in each.gradients().items()}
            for _ in range(len(steps)):
                runs[label]()
        seconds, busy = paired(runs, repeats, case.steps, lambda text: status.update(f"({name}) {text}"))
        status.update(f"({name}) memory")
        peaks = {label: peak_bytes(run) for label, run in runs.items()}
    return {
        "case": name,
        "title": case.title,
        "seconds": seconds,
        "busy": busy,
        "first step": ready,
        "peak": peaks,
        "difference": _difference(gradients["graphcomp"], gradients["peer, eager"]),
        "valid tokens": sum(int((b["labels"] != IGNORED).sum()) for b in _all(steps)) / len(steps),
        "tokens of the peer": case.microbatches * case.rows * case.length,
    }


def _all(steps: list[Batches]) -> Batches:
    return [batch for step in steps for batch in step]


def _cycle(contestant: Any, steps: list[Batches]) -> Callable[[], torch.Tensor]:
    """A function that runs the next of the prepared steps."""
    prepare = getattr(contestant, "prepare", lambda batches: batches)
    prepared = [prepare(batches) for batches in steps]
    place = -1

    def run() -> torch.Tensor:
        nonlocal place
        place = (place + 1) % len(prepared)
        return contestant.run(prepared[place])

    return run


def _difference(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """The largest relative difference of a gradient that both hold on this rank, after the first step."""
    shared = mine.keys() & theirs.keys()
    return max((float((mine[n] - theirs[n]).norm() / theirs[n].norm()) for n in shared), default=float("nan"))
