"""Aligned plain text: columns, sizes in bytes, counts, ranges of module names."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence

WIDTH = 110


def columns(rows: Sequence[Sequence[object]], right: Iterable[int] = (), indent: int = 2) -> list[str]:
    """The rows as lines with aligned columns, two blanks apart; the columns in `right` are flush right."""
    texts = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)] if texts else []
    flush = set(right)
    lines = []
    for row in texts:
        cells = [c.rjust(w) if i in flush else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        lines.append(shorten(" " * indent + "  ".join(cells).rstrip()))
    return lines


def wrapped(label: str, parts: Iterable[str], indent: int = 2) -> list[str]:
    """`label` and a list of words, broken into lines at commas."""
    first, later = " " * indent + label, " " * (indent + len(label))
    text = ", ".join(part.replace(" ", "\x00") for part in parts)  # a part is not broken
    lines = textwrap.wrap(
        text, WIDTH, initial_indent=first, subsequent_indent=later, break_long_words=False, break_on_hyphens=False
    )
    return [shorten(line.replace("\x00", " ")) for line in lines]


def shorten(line: str) -> str:
    return line if len(line) <= WIDTH else line[: WIDTH - 3] + "..."


def size(count: float) -> str:
    """Bytes in words: `512 B`, `1.5 KiB`, `2.0 MiB`."""
    if count < 1024:
        return f"{count:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        count /= 1024
        if count < 1024:
            return f"{count:.1f} {unit}"
    return f"{count / 1024:.1f} TiB"


def count(number: float) -> str:
    """A number in words: `512`, `1.5 K`, `2.0 M`, `3.1 G`, `4.0 T`."""
    if number < 1000:
        return f"{number:.0f}"
    for unit in ("K", "M", "G"):
        number /= 1000
        if number < 1000:
            return f"{number:.1f} {unit}"
    return f"{number / 1000:.1f} T"


def ranges(names: Iterable[str]) -> list[str]:
    """Names in order, each run of one family as a range: h.0, h.1, h.2, norm -> h.0-h.2, norm."""
    found: list[list[str]] = []
    for name in names:
        if found and _follows(found[-1][-1], name):
            found[-1].append(name)
        else:
            found.append([name])
    return [run[0] if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in found]


def _follows(former: str, name: str) -> bool:
    a, b = re.fullmatch(r"(.*\.|)(\d+)", former), re.fullmatch(r"(.*\.|)(\d+)", name)
    return a is not None and b is not None and a[1] == b[1] and int(b[2]) == int(a[2]) + 1
