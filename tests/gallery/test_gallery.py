"""Every model of the gallery equals eager PyTorch at 1, 2 and 4 stages, and the page lists them all."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from graphcomp.testing import survey

pytest.importorskip("transformers")

from tests.gallery.models import ENTRIES, Entry

PAGE = Path(__file__).parents[2] / "docs" / "gallery.md"


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_a_model_as_its_author_wrote_it(entry: Entry) -> None:
    found = survey(entry.build(), entry.loss_fn, entry.microbatches(), name=entry.name)
    assert found.refused is None, str(found)
    assert found.stages == (1, 2, 4) and found.error <= 1e-5 and found.tied is not False, str(found)


def test_the_page_lists_exactly_the_models_of_the_gallery() -> None:
    rows = re.findall(r"^\| (.+?) \| `(.+?)` \|", PAGE.read_text(), flags=re.M)
    assert rows == [(entry.name, entry.source) for entry in ENTRIES], "run `make gallery`"
