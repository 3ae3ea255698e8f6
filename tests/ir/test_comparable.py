"""What makes the programs of two processes the same to read: what they do and where that comes from, not what a trace
happened to call it.
"""

from __future__ import annotations

from typing import Any

import pytest
from expecttest import TestCase

from graphcomp.ir.comparable import comparable
from graphcomp.ir.meta import Note, Phase
from graphcomp.ir.printer import print_program
from graphcomp.ir.signature import Param
from tests.ir.test_digest import aten, small


class TestText(TestCase):
    def test_one_line_each(self) -> None:
        program = small(note=Note(Phase.FORWARD, "fc", "a.py:1"))
        self.assertExpectedInline(
            comparable(program),
            """\
%0: f32[s0, 8] = batch x
%1: f32[8] = param w
%2: f32[s0, 8] = add.Tensor(%0, %1)  # fc  a.py:1
%3: f32[s0, 8] = mul.Tensor(%2, 0.1)  # fc  a.py:1
%4: bf16[s0, 8] = _to_copy(%3, dtype=bf16)  # fc  a.py:1
return output y = %4""",
        )


@pytest.mark.parametrize("change", [{"name": "q"}, {"rows": 9}], ids=str)
def test_names_of_nodes_and_example_sizes_do_not_count(change: dict[str, Any]) -> None:
    assert comparable(small(**change)) == comparable(small())
    if "name" in change:
        assert print_program(small(**change)) != print_program(small())


CHANGES: list[dict[str, Any]] = [
    {"role": Param("v")},
    {"op": aten.div.Tensor},
    {"factor": 0.2},
    {"swap": True},
    {"fixed": True},
    {"weight": (1,)},
    {"note": Note(Phase.FORWARD, "other")},
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: next(iter(change)))
def test_what_does(change: dict[str, Any]) -> None:
    assert comparable(small(**change)) != comparable(small())
