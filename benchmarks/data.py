"""graphcomp over data ranks against DistributedDataParallel and fully_shard: step time and memory.

    python benchmarks/data.py [--case replicate|shard|overlap|regather|all] [--repeats N] [--json FILE]

Two processes over gloo, one thread each; four microbatches of unequal token counts in a step, one loss over all of
them. In one run and in alternation: graphcomp, and the peer once eager and once under torch.compile, each with
gradients communicated once in a step. Every case is printed, also where the peer wins. Clock times mean something on an
idle machine only; the processor time of each rank, without the other's, is printed beside them.

Memory is measured in processes of its own, on microbatches of 16 tokens, so that nearly all of it is parameters,
gradients and communication: what is held between steps, and the most within a step.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

import data_cases  # noqa: E402
import data_memory  # noqa: E402
import torch  # noqa: E402
from measure import ratios  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from graphcomp.testing import run_ranks  # noqa: E402

TIMEOUT = 3600.0
MINE = "graphcomp"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", default="all", choices=[*data_cases.CONTESTS, "all"])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    console, results = Console(), []
    if not console.is_terminal:
        console = Console(width=140)
    for name in data_cases.CONTESTS if options.case == "all" else [options.case]:
        found = measure(name, options.repeats)
        console.print(table(found))
        results.append(found)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


def measure(name: str, repeats: int) -> dict[str, Any]:
    ranks = run_ranks(data_cases.timing, 2, name, repeats, timeout=TIMEOUT, fresh=True)
    memory: dict[str, list[tuple[int, int]]] = {label: [] for label in ranks[0]["busy"]}
    with data_memory.counting() as counts:
        for label in memory if counts else ():
            memory[label] = run_ranks(data_cases.memory, 2, name, label, timeout=TIMEOUT, fresh=True)
    return ranks[0] | {
        "case": name,
        "title": data_cases.CONTESTS[name].title,
        "busy": {label: [rank["busy"][label] for rank in ranks] for label in ranks[0]["busy"]},
        "difference": max(rank["difference"] for rank in ranks),
        "tokens": [rank["tokens"] for rank in ranks],
        "memory": memory,
    }


def table(found: dict[str, Any]) -> Table:
    seconds = found["seconds"]
    caption = (
        f"{' and '.join(map(str, found['tokens']))} valid tokens on the ranks; {found['parameters'] / 1e6:.1f} MB of "
        f"parameters; largest relative difference of a gradient {found['difference']:.1e}"
    )
    shown = Table(title=f"({found['case']}) {found['title']}", caption=caption)
    for heading in (
        "",
        "s/step, min",
        "median",
        "CPU s/step by rank",
        "graphcomp takes, min",
        "median",
        "held MB by rank",
        "peak MB by rank",
        "first step, s",
    ):
        shown.add_column(heading, justify="left" if not heading else "right")
    for label, each in seconds.items():
        least, middle = ratios(seconds[MINE], each)
        held, peak = ([f"{rank[i] / 1e6:.1f}" for rank in found["memory"][label]] for i in (0, 1))
        shown.add_row(
            label,
            f"{min(each):.4f}",
            f"{statistics.median(each):.4f}",
            ", ".join(f"{min(rank):.4f}" for rank in found["busy"][label]),
            "" if label == MINE else f"{least:.2f}x",
            "" if label == MINE else f"{middle:.2f}x",
            ", ".join(held) or "-",
            ", ".join(peak) or "-",
            f"{found['first step'][label]:.1f}",
        )
    return shown


if __name__ == "__main__":
    main()
