"""Groups have the same text on every run and rank."""

from __future__ import annotations

import pytest

from graphcomp.ir.groups import is_text, text_of
from graphcomp.plan import AXES

TEXTS = [
    ([0], "ranks(0)"),
    ([0, 1], "ranks(0,1)"),
    ([0, 1, 2, 3, 8], "ranks(0-3,8)"),
    ([4, 5, 6, 9, 10, 12, 13, 14], "ranks(4-6,9,10,12-14)"),
    ([3, 2, 1, 0], "ranks(3,2,1,0)"),
    ([1, 0, 1000], "ranks(1,0,1000)"),
]


@pytest.mark.parametrize(("ranks", "text"), TEXTS)
def test_texts(ranks: list[int], text: str) -> None:
    assert text_of(ranks) == text
    assert is_text(text) and is_text(f"{text}#2")


@pytest.mark.parametrize("name", AXES)
def test_axes_are_texts(name: str) -> None:
    assert is_text(name)


@pytest.mark.parametrize("name", ["0", "12", "ranks()", "ranks(0,)", "ranks(0)x", "ranks(0)#", "xp", ""])
def test_serials_are_none(name: str) -> None:
    assert not is_text(name)
