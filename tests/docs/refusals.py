"""The page of refusals: each example is run, and what it prints stands on the page.

python -m tests.docs.refusals writes the messages into docs/refusals.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from graphcomp import Plan
from graphcomp.errors import GraphcompError
from graphcomp.testing import check_parity, run_virtual

ROOT = Path(__file__).parents[2]
PAGE = Path("docs") / "refusals.md"
_SECTION = re.compile(
    r"^## (?P<title>.+?)\n.*?^```python\n(?P<refused>.*?)^```\n.*?^```text\n(?P<message>.*?)^```\n"
    r".*?^```python\n(?P<remedy>.*?)^```\n",
    flags=re.M | re.S,
)
_BLOCK = re.compile(r"^```python\n(.*?)^```\n", flags=re.M | re.S)


@dataclass(frozen=True)
class Section:
    """One refusal. refused, remedy: code that defines `model`; with the lines where they stand."""

    title: str
    refused: str
    refused_line: int
    message: str
    remedy: str
    remedy_line: int

    def printed(self) -> str:
        """What the refusal prints."""
        made = _defined(self.refused, self.refused_line)
        try:
            run_virtual(made["model"], made["loss_fn"], made["batches"], plan=_plan(2))
        except GraphcompError as error:
            return f"{type(error).__name__}: {error}\n"
        raise ValueError(f"section '{self.title}' is not refused")

    def check_remedy(self) -> None:
        """The remedy equals eager PyTorch, on one stage and on two."""
        made = _defined(self.remedy, self.remedy_line)
        for stages in (1, 2):
            check_parity(made["model"], made["loss_fn"], made["batches"], plan=_plan(stages))


def _plan(stages: int) -> Plan:
    return Plan(stages=stages, backend="eager", quiet=True)


def _defined(code: str, line: int) -> dict[str, Any]:
    """The names that a block of the page defines; its lines are those of the page."""
    names: dict[str, Any] = {"__name__": "refusals"}
    torch.manual_seed(0)
    first = _BLOCK.search((ROOT / PAGE).read_text())  # what all examples begin with
    exec(first[1] if first else "", names)
    exec(compile("\n" * (line - 1) + code, str(PAGE), "exec"), names)
    return names


def sections(text: str) -> Iterator[Section]:
    for found in _SECTION.finditer(text):
        lines = {name: text.count("\n", 0, found.start(name)) + 1 for name in ("refused", "remedy")}
        yield Section(
            found["title"], found["refused"], lines["refused"], found["message"], found["remedy"], lines["remedy"]
        )


def written(text: str) -> str:
    """The page with the messages that its examples print now."""

    def replaced(found: re.Match[str]) -> str:
        section = next(iter(sections("\n" * text.count("\n", 0, found.start()) + found[0])))
        start, end = (place - found.start() for place in found.span("message"))
        return found[0][:start] + section.printed() + found[0][end:]

    return _SECTION.sub(replaced, text)


def main() -> None:
    path = ROOT / PAGE
    text = path.read_text()
    while (new := written(text)) != text:  # a longer message moves the lines of the sections below
        text = new
    path.write_text(text)


if __name__ == "__main__":
    main()
