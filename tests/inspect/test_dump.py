"""Folders of program texts."""

from __future__ import annotations

from pathlib import Path

import pytest

import graphcomp as gc
from graphcomp.errors import StepError
from graphcomp.inspect import Text, dump, dump_step, explain
from tests.zoo import ZOO


def contents(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()}


def test_files_in_order_with_an_index(tmp_path: Path) -> None:
    paths = dump(tmp_path / "new" / "run", [Text("plan", "a\nb\n"), Text("stage 0 forward", "c")])
    assert [path.name for path in paths] == ["00_plan.txt", "01_stage_0_forward.txt", "index.txt"]
    assert contents(tmp_path / "new" / "run") == {
        "00_plan.txt": "a\nb\n",
        "01_stage_0_forward.txt": "c\n",
        "index.txt": "00_plan.txt  plan, 2 lines\n01_stage_0_forward.txt  stage 0 forward, 1 line\n",
    }


def test_a_second_dump_replaces_the_first_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    dump(tmp_path, [Text("plan", "1"), Text("joint", "2"), Text("rank 0", "3")])
    dump(tmp_path, [Text("plan", "4")])
    assert sorted(contents(tmp_path)) == ["00_plan.txt", "index.txt", "notes.txt"]
    assert contents(tmp_path)["00_plan.txt"] == "4\n"


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StepError, match="the dump needs a folder"):
        dump(tmp_path / "file", [])


def test_a_compilation_writes_every_program_the_same_every_time(tmp_path: Path) -> None:
    found = []
    for name in ("one", "two"):
        case = ZOO["tied_gpt"]
        compiler = gc.GraphCompiler(case.build(), case.loss_fn, gc.Plan(stages=2, quiet=True))
        compiler.capture(case.microbatches(1)[0])
        programs = compiler.lower()
        plan_text = explain(compiler.partition(), compiler.plan, programs.schedule)
        dump_step(tmp_path / name, compiler, programs, plan_text)
        found.append(contents(tmp_path / name))
    assert found[0] == found[1]
    assert sorted(found[0]) == [
        "00_plan.txt",
        "01_joint.txt",
        "02_passes.txt",
        "03_prologue.txt",
        "04_stage_0_forward.txt",
        "05_stage_0_backward.txt",
        "06_stage_1_forward.txt",
        "07_stage_1_backward.txt",
        "08_stage_1_forward_and_backward.txt",
        "09_schedule.txt",
        "10_rank_0.txt",
        "11_rank_1.txt",
        "index.txt",
    ]
