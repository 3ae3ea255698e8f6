"""graphcomp against torch.distributed.pipelining: step time, memory, and what compiling costs.

    python benchmarks/pipeline.py [--case a|b|c|compile|llama|all] [--repeats N] [--json FILE]

Two processes over gloo, one thread each. In one run and in alternation: graphcomp, and the peer on hand-cut
halves, once eager and once under torch.compile. graphcomp cuts where it finds the load balanced and runs the
peer's schedule; in (a) also with the peer's cut, in (a) and (b) also with another schedule, and in (b) both
also with Inductor's C++ wrapper. Every case is printed, also where the peer wins. Clock times mean something on
an idle machine only; the processor time of each rank, without the other's, is printed beside them.
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

import cases  # noqa: E402
import growth  # noqa: E402
import torch  # noqa: E402
from measure import ratios  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from graphcomp.testing import run_ranks  # noqa: E402

TIMEOUT = 3600.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", default="all", choices=[*cases.CASES, "compile", "llama", "all"])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    console, results = Console(), []
    if not console.is_terminal:
        console = Console(width=140)
    wanted = [*cases.CASES, "compile", "llama"] if options.case == "all" else [options.case]
    for name in wanted:
        found = measure(name, options.repeats)
        console.print(table(found))
        results.append(found)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


def measure(name: str, repeats: int) -> dict[str, Any]:
    if name == "compile":
        return _each(name, [lambda n=n: growth.layers(n, n <= 16) for n in growth.LAYERS])
    if name == "llama":
        return _each(name, [growth.llama])
    first, second = run_ranks(cases.pipeline, 2, name, repeats, timeout=TIMEOUT, fresh=True)
    both = {
        key: {label: [rank[key][label] for rank in (first, second)] for label in first[key]} for key in ("peak", "busy")
    }
    return first | both | {"difference": max(first["difference"], second["difference"])}


def _each(name: str, calls: list[Any]) -> dict[str, Any]:
    with Console(stderr=True).status(f"({name}) capturing and compiling"):
        return {"case": name, "rows": [call() for call in calls]}


def table(found: dict[str, Any]) -> Table:
    return _growth(found) if "rows" in found else _pipeline(found)


def _growth(found: dict[str, Any]) -> Table:
    """Seconds by number of layers; compiling covers all programs of both stages."""
    shown = Table(title=f"({found['case']}) seconds, two stages, symbolic sizes")
    for heading in ("layers", "capture", "partition", "compile"):
        shown.add_column(heading, justify="right")
    for row in found["rows"]:
        numbers = (f"{row[key]:.2f}" if key in row else "-" for key in ("capture", "partition", "compile"))
        shown.add_row(str(row["layers"]), *numbers)
    return shown


def _pipeline(found: dict[str, Any]) -> Table:
    seconds = found["seconds"]
    caption = (
        f"{found['valid tokens']:.0f} valid tokens a step, {found['tokens of the peer']} computed by the peer; "
        f"largest relative difference of a gradient {found['difference']:.1e}"
    )
    shown = Table(title=f"({found['case']}) {found['title']}", caption=caption)
    peers = [label for label in seconds if label.startswith("peer")]
    headings = ("", "s/step, min", "median", "CPU s/step by rank", "valid tokens/s", *(f"of {peer}" for peer in peers))
    for heading in (*headings, "peak MB by rank", "first step, s"):
        shown.add_column(heading, justify="left" if not heading else "right")
    for label, each in seconds.items():
        middle = statistics.median(each)
        shown.add_row(
            label,
            f"{min(each):.4f}",
            f"{middle:.4f}",
            ", ".join(f"{min(rank):.4f}" for rank in found["busy"][label]),
            f"{found['valid tokens'] / middle:.0f}",
            *("" if label in peers else _share(each, seconds[peer]) for peer in peers),
            ", ".join(f"{peak / 1e6:.1f}" for peak in found["peak"][label]),
            f"{found['first step'][label]:.1f}",
        )
    return shown


def _share(mine: list[float], theirs: list[float]) -> str:
    """Smallest and median share of the peer's time, repeat by repeat."""
    least, middle = ratios(mine, theirs)
    return f"{least:.2f}x ({middle:.2f}x)"


if __name__ == "__main__":
    main()
