"""The pages are true: code blocks run, links lead somewhere, every error class is explained."""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from graphcomp import errors
from graphcomp.dataparallel.build import step_program
from graphcomp.dataparallel.programs import reduce_program
from graphcomp.dataparallel.spec import Spec
from graphcomp.plan import Plan

ROOT = Path(__file__).parent.parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
NO_RUN = "<!-- no-run -->"


@dataclass(frozen=True)
class Block:
    line: int  # of the first line of code, counted from 1
    code: str


def python_blocks(text: str) -> list[Block]:
    """The ```python blocks that are to be run. A marker line just before a fence takes its block out."""
    blocks, lines, start = [], text.splitlines(), None
    for number, line in enumerate(lines):
        if start is None and line.strip() == "```python":
            start = number + 1
        elif start is not None and line.strip() == "```":
            if start < 2 or lines[start - 2].strip() != NO_RUN:
                blocks.append(Block(start + 1, "\n".join(lines[start:number]) + "\n"))
            start = None
    if start is not None:
        raise ValueError(f"the code block in line {start} has no end")
    return blocks


def anchors(text: str) -> set[str]:
    """Anchors as the usual renderers make them from headings."""
    titles = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def dead_links(page: Path) -> list[str]:
    dead = []
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        name, _, anchor = link.partition("#")
        if "://" in name:
            continue
        target = (page.parent / name).resolve() if name else page
        if not target.exists() or (anchor and anchor not in anchors(target.read_text())):
            dead.append(link)
    return dead


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_blocks_run(page: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """All blocks of a page run in order in one namespace, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": f"page_{page.stem}"}
    for block in python_blocks(page.read_text()):
        # Blank lines in front, so that a traceback shows the line of the page.
        code = compile("\n" * (block.line - 1) + block.code, str(page), "exec", dont_inherit=True)
        exec(code, namespace)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    assert not dead_links(page)


def test_every_error_class_is_explained() -> None:
    explained = anchors((ROOT / errors.DOCS).read_text())
    assert {name.lower() for name in errors.__all__} <= explained


def test_every_error_names_its_section() -> None:
    for name in errors.__all__:
        assert str(getattr(errors, name)("something happened")).endswith(f"(see {errors.DOCS}#{name.lower()})")


def test_every_page_is_in_the_reading_order() -> None:
    index = (ROOT / "docs" / "index.md").read_text()
    assert all(f"{page.name})" in index for page in PAGES if page.name != "index.md")


def test_the_step_program_on_the_page_is_how_it_prints() -> None:
    specs = [Spec("head.weight", (4, 3), torch.float32, "cpu"), Spec("head.bias", (4,), torch.float32, "cpu")]
    program = step_program(reduce_program(0, specs, [], ranks=2), Plan().bucket_bytes)
    assert textwrap.indent(str(program), "    ") in (ROOT / "docs" / "concepts.md").read_text()


def test_blocks_are_found_with_their_lines() -> None:
    run, other = "```python\nx = 1\n```\n", "```text\nno\n```\n"
    text = f"a\n{run}{NO_RUN}\n{run}{other}{run}"
    assert python_blocks(text) == [Block(3, "x = 1\n"), Block(13, "x = 1\n")]


def test_a_block_without_an_end_is_an_error() -> None:
    with pytest.raises(ValueError, match="line 2 has no end"):
        python_blocks("text\n```python\nx = 1\n")


def test_dead_links_are_found(tmp_path: Path) -> None:
    page = tmp_path / "a.md"
    page.write_text("# A title\n[1](a.md#a-title) [2](#a-title) [3](b.md) [4](#other) [5](https://example.org/x)\n")
    assert dead_links(page) == ["b.md", "#other"]
