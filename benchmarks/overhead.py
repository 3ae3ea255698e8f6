"""What a step costs on the host besides the compiled calls, per action: guards, dispatch, look-ups, executor.

    python benchmarks/overhead.py [--layers N] [--microbatches N] [--repeats N] [--json FILE]

One process, one thread, CPU. A GPT is compiled for 1, 2 and 4 stages, all in this process; messages are copies in
memory. Then every compiled call is replaced by one that hands out the results of its first call, and the parts of a
step are timed one by one, in processor time; a loop of nothing but those calls is taken off. Each number is the least
over the repeats.

    guards     does the model still hold what its programs rely on
    dispatch   which program serves each microbatch, with which sizes
    look-up    which rank programs serve the step
    executor   instructions of all ranks, messages among them, and the results of the step
    writing    gradients into `.grad`
    counting   the tokens of all microbatches
    zeros      what sums of gradients begin with

The last two are work on tensors, which eager PyTorch does too; the target is for the rest. An action is a forward, a
backward, or both in one: with one stage there is one for each microbatch, which then bears all of its costs.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

import models  # noqa: E402
import torch  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

import graphcomp as gc  # noqa: E402
from graphcomp.backend import Backend, Compiled  # noqa: E402
from graphcomp.capture.guards import ModelGuard  # noqa: E402
from graphcomp.compat.zeros import zero_all  # noqa: E402
from graphcomp.dispatch import Dispatcher  # noqa: E402
from graphcomp.ir.program import Program  # noqa: E402
from graphcomp.runtime.program.instructions import BeginGradients, Run  # noqa: E402
from graphcomp.testing import VirtualStep  # noqa: E402

TARGET = 60.0
"""Microseconds per action, for what is no work on tensors."""
HOST = ("guards", "dispatch", "look-up", "executor", "writing")
TENSORS = ("counting", "zeros")


@dataclass
class Replay:
    """A backend whose callables compute once and then return what they have."""

    inner: Backend
    programs: int = 0
    reused: int = 0
    name: str = "replay"

    def compile(self, program: Program, groups: Mapping[str, str] | None = None) -> Compiled:
        compiled = self.inner.compile(program, groups)
        results: tuple[Any, ...] | None = None

        def call(box: list[Any]) -> tuple[Any, ...]:
            nonlocal results
            if results is None:
                results = tuple(compiled.call(box))
            box.clear()
            return results

        self.programs += 1
        return Compiled(call)


def loss_fn(logits: torch.Tensor, batch: dict[str, torch.Tensor]) -> gc.TokenLoss:
    return gc.token_loss(logits, batch["labels"])


def seconds(run: Callable[[], object], repeats: int, loops: int = 20) -> float:
    """The least processor time of one call, over repeats of some calls each."""
    least = float("inf")
    for _ in range(repeats):
        begin = time.process_time()
        for _ in range(loops):
            run()
        least = min(least, (time.process_time() - begin) / loops)
    return least


def measure(stages: int, layers: int, microbatches: int, repeats: int) -> dict[str, Any]:
    """Microseconds per action, by part."""
    model = models.make(models.Config(width=32, layers=layers, heads=4, vocabulary=64, longest=64))
    draw = torch.Generator().manual_seed(0)
    batches = [
        {name: torch.randint(64, (2, 16), generator=draw) for name in ("ids", "labels")} for _ in range(microbatches)
    ]
    step = VirtualStep(model, loss_fn, plan=gc.Plan(stages=stages, backend="eager", quiet=True))
    step.compiler.backend = Replay(step.compiler.backend)
    ran = step.run(batches)
    engine, bound = step._engine, step.bind(batches)
    guard, dispatcher = ModelGuard(model, loss_fn), Dispatcher(step.compiler, torch.device("cpu"))
    dispatcher.select(batches, True)
    programs = [executor.program for executor in bound.lines[0].prepared.executors]
    runs = [one for program in programs for one in program.instructions if isinstance(one, Run)]
    boxes = [[None] * len(one.arguments) for one in runs]

    def empty() -> None:
        for box in boxes:
            call(list(box))

    def call(box: list[Any]) -> list[Any]:
        box.clear()
        return box

    forms = [
        form
        for program in programs
        for one in program.instructions
        if isinstance(one, BeginGradients)
        for form in one.forms
    ]

    def zero() -> None:
        zero_all([torch.empty_strided(form.shape, form.strides, dtype=form.dtype) for form in forms])

    def write() -> None:
        model.zero_grad()
        engine.state.commit(ran.gradients, {})

    found = {
        "guards": seconds(guard.key, repeats),
        "select": seconds(lambda: dispatcher.select(batches, True), repeats),
        "bind": seconds(lambda: step.bind(batches), repeats),
        "zeros": seconds(zero, repeats),
        "counting": seconds(lambda: engine.count(bound), repeats),
        "run": seconds(lambda: engine.run(bound), repeats) - seconds(empty, repeats),
        "writing": seconds(write, repeats) - seconds(model.zero_grad, repeats),
    }
    found["dispatch"] = found["select"] - found["guards"]
    found["look-up"] = found["bind"] - found["select"]
    found["executor"] = found["run"] - found["counting"] - found["zeros"]
    each = {name: 1e6 * found[name] / len(runs) for name in (*HOST, *TENSORS)}
    return {
        "stages": stages,
        "parameters": len(list(model.parameters())),
        "modules": len(list(model.modules())),
        "microbatches": microbatches,
        "actions": len(runs),
        **each,
        "host": sum(each[name] for name in HOST),
    }


def table(results: list[dict[str, Any]]) -> Table:
    first = results[0]
    shown = Table(
        title=f"microseconds per action besides the compiled calls: {first['microbatches']} microbatches, "
        f"{first['modules']} modules, {first['parameters']} parameters; target {TARGET:.0f}"
    )
    columns = ("stages", "actions", *HOST, "host", *TENSORS)
    for column in columns:
        shown.add_column(column, justify="right")
    for found in results:
        shown.add_row(*(f"{found[c]:.1f}" if isinstance(found[c], float) else str(found[c]) for c in columns))
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = [measure(stages, options.layers, options.microbatches, options.repeats) for stages in (1, 2, 4)]
    console = Console()
    if not console.is_terminal:
        console = Console(width=140)
    console.print(table(results))
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
