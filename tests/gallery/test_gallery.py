"""Models of the gallery equal eager PyTorch at 1, 2 and 4 stages, and the page lists them all."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from graphcomp.testing import survey

pytest.importorskip("transformers")

from tests.gallery.models import ENTRIES, Entry

PAGE = Path(__file__).parents[2] / "docs" / "gallery.md"
LIKE_ANOTHER = {
    *("GPT-J", "GPT-NeoX", "OPT", "Bloom", "Falcon", "Phi"),  # like GPT-2 and Llama
    *("Mistral", "Qwen3", "OLMo 2", "Gemma 2"),  # like Llama and Gemma 3
    *("RoBERTa", "DistilBERT", "Qwen3-MoE", "BART", "Whisper"),  # like BERT, Mixtral and T5
}
"""Tried by `make test-wide`: each has what one of the others has too."""


def each(entry: Entry) -> object:
    return pytest.param(entry, id=entry.name, marks=[pytest.mark.wide] if entry.name in LIKE_ANOTHER else [])


@pytest.mark.parametrize("entry", [each(entry) for entry in ENTRIES])
def test_a_model_as_its_author_wrote_it(entry: Entry) -> None:
    found = survey(entry.build(), entry.loss_fn, entry.microbatches(), name=entry.name)
    assert found.refused is None, str(found)
    assert found.stages == (1, 2, 4) and found.error <= 1e-5 and found.tied is not False, str(found)


def test_those_left_out_are_there() -> None:
    assert {entry.name for entry in ENTRIES} > LIKE_ANOTHER


def test_the_page_lists_exactly_the_models_of_the_gallery() -> None:
    rows = re.findall(r"^\| (.+?) \| `(.+?)` \|", PAGE.read_text(), flags=re.M)
    assert rows == [(entry.name, entry.source) for entry in ENTRIES], "run `make gallery`"
