"""The page of refusals shows what is printed, and its remedies work."""

from __future__ import annotations

import pytest

from tests.docs.refusals import PAGE, ROOT, Section, sections

SECTIONS = tuple(sections((ROOT / PAGE).read_text()))


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.title)
def test_a_refusal_prints_what_the_page_shows_and_its_remedy_works(section: Section) -> None:
    assert section.printed() == section.message, "run `python -m tests.docs.refusals`"
    section.check_remedy()


def test_every_section_is_an_example() -> None:
    titles = [line[3:] for line in (ROOT / PAGE).read_text().splitlines() if line.startswith("## ")]
    assert titles == [section.title for section in SECTIONS] and len(titles) >= 10
