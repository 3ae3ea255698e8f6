"""Pipelines: text there and back, contracts checked beforehand, verification and records between passes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
from expecttest import TestCase

from graphcomp.errors import PlanError, VerifyError
from graphcomp.ir.printer import print_program
from graphcomp.ir.program import Level, Program
from graphcomp.passes.base import Pass
from graphcomp.passes.manager import PassManager
from graphcomp.passes.pipeline import parse_pipeline, pipeline_text
from tests.ir.build import aten
from tests.passes.test_dead_code import sample


@dataclass(frozen=True)
class Tile(Pass):
    """A pass with options of each kind."""

    size: int = 4
    share: float = 0.5
    order: str = "rows"
    eager: bool = False
    name: ClassVar[str] = "tile"
    requires: ClassVar[frozenset[str]] = frozenset({"flat"})
    conflicts: ClassVar[frozenset[str]] = frozenset({"tiled"})
    provides: ClassVar[frozenset[str]] = frozenset({"tiled"})
    levels: ClassVar[frozenset[Level]] = frozenset({Level.JOINT})

    def apply(self, program: Program) -> Program:
        return program


@dataclass(frozen=True)
class Flatten(Pass):
    name: ClassVar[str] = "flatten"
    provides: ClassVar[frozenset[str]] = frozenset({"flat"})

    def apply(self, program: Program) -> Program:
        return program


@dataclass(frozen=True)
class OnStages(Pass):
    name: ClassVar[str] = "on_stages"
    levels: ClassVar[frozenset[Level]] = frozenset({Level.STAGE})

    def apply(self, program: Program) -> Program:
        return program


@dataclass(frozen=True)
class Breaks(Pass):
    """Puts an in-place operation into the program."""

    name: ClassVar[str] = "breaks"

    def apply(self, program: Program) -> Program:
        program.calls()[-1].target = aten.sin_.default
        return program


KNOWN = {kind.name: kind for kind in (Tile, Flatten)}


def test_text_of_a_pipeline_there_and_back() -> None:
    text = "cse,dead_code,decompose{table=core},functionalize,noop"
    assert pipeline_text(parse_pipeline(text)) == text
    assert str(parse_pipeline("decompose")[0]) == "decompose{table=inductor}"
    given = [Flatten(), Tile(size=8, eager=True)]
    assert pipeline_text(given) == "flatten,tile{size=8,share=0.5,order=rows,eager=true}"
    assert parse_pipeline(pipeline_text(given), KNOWN) == given
    assert parse_pipeline(" flatten , tile{ size = 8, eager=true } ", KNOWN) == given
    assert parse_pipeline("") == []


class TestErrors(TestCase):
    maxDiff = None

    def check(self, text: str, expected: str) -> None:
        with pytest.raises(PlanError) as error:
            parse_pipeline(text, KNOWN)
        self.assertEqual(str(error.value).splitlines()[:-1], expected.strip("\n").splitlines())

    def test_text(self) -> None:
        self.check(
            "flatten,tile{size",
            """
the text of a pipeline is malformed
  where: character 8: 'tile{size'
  expected: name or name{option=value,...}, separated by commas
""",
        )
        self.check("fold", "there is no pass 'fold'\n  expected: flatten, tile\n  got: fold")
        self.check(
            "tile{width=2}",
            "pass 'tile' has no option 'width'\n  expected: size, share, order, eager\n  got: width=2",
        )
        self.check(
            "tile{size=big}",
            "an option has a value of the wrong type\n"
            "  where: option 'size' of pass 'tile'\n  expected: int\n  got: big",
        )

    def refused(self, passes: list[Pass]) -> str:
        with pytest.raises(PlanError) as error:
            PassManager(passes)
        return str(error.value)

    def test_contracts(self) -> None:
        self.assertExpectedInline(
            self.refused([Tile(), Flatten()]),
            """\
pass 'tile{size=4,share=0.5,order=rows,eager=false}' requires 'flat', which nothing before it provides
  where: pass 1 of tile{size=4,share=0.5,order=rows,eager=false},flatten
  got: 'flatten' provides it, but comes later
  what to do: move 'flatten' before 'tile{size=4,share=0.5,order=rows,eager=false}'
  (see docs/errors.md#planerror)""",
        )
        self.assertExpectedInline(
            self.refused([Tile()]),
            """\
pass 'tile{size=4,share=0.5,order=rows,eager=false}' requires 'flat', which nothing before it provides
  where: pass 1 of tile{size=4,share=0.5,order=rows,eager=false}
  got: no pass of the pipeline provides it
  what to do: add a pass that provides 'flat'
  (see docs/errors.md#planerror)""",
        )
        self.assertExpectedInline(
            self.refused([Flatten(), Tile(), Tile(8)]),
            """\
pass 'tile{size=8,share=0.5,order=rows,eager=false}' cannot run after 'tile{size=4,share=0.5,order=rows,eager=false}', which provides 'tiled'
  where: pass 3 of flatten,tile{size=4,share=0.5,order=rows,eager=false},tile{size=8,share=0.5,order=rows,eager=false}
  what to do: change their order, or leave one of them out
  (see docs/errors.md#planerror)""",  # noqa: E501
        )
        self.assertExpectedInline(
            self.refused([Flatten(), Tile(), OnStages()]),
            """\
passes 'tile{size=4,share=0.5,order=rows,eager=false}' and 'on_stages' apply at different levels
  expected: joint for 'tile{size=4,share=0.5,order=rows,eager=false}'
  got: stage for 'on_stages'
  what to do: run them in two pipelines, each on programs of its level
  (see docs/errors.md#planerror)""",
        )

    def test_wrong_level(self) -> None:
        with pytest.raises(PlanError) as error:
            PassManager([OnStages()]).run(sample())
        self.assertExpectedInline(
            str(error.value),
            """\
pass 'on_stages' does not apply at level joint
  where: program 'sample'
  expected: stage
  got: joint
  (see docs/errors.md#planerror)""",
        )

    def test_a_pass_that_breaks_the_program_is_named(self) -> None:
        manager = PassManager([Breaks()])
        with pytest.raises(VerifyError, match="made by 'breaks'"):
            manager.run(sample())


def test_given_properties_count() -> None:
    PassManager([Tile()], given=["flat"])


def test_records_and_the_given_program_stays() -> None:
    program = sample()
    before = print_program(program)
    manager = PassManager(parse_pipeline("noop,dead_code"), keep_text=True)
    result = manager.run(program)
    assert print_program(program) == before
    assert [(r.made_by, r.nodes_before, r.nodes_after) for r in manager.records] == [
        ("noop", 3, 3),
        ("dead_code", 3, 1),
    ]
    assert manager.records[-1].text == print_program(result)
    assert manager.dump().startswith("# noop: 3 -> 3 nodes, ")
    quiet = PassManager(parse_pipeline("noop"))
    quiet.run(program)
    assert quiet.records[0].text is None and "\n" not in quiet.dump()
