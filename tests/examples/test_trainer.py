"""The example trainer: nothing in it but `place` asks where it runs, and it goes on at another layout."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cases.test_one_text import place_tests
from tests.examples.test_examples import EXAMPLES, run

NAME = "05_trainer.py"
SMALL = (
    *("--steps", "6", "--microbatches", "2", "--rows", "3", "--longest", "80", "--width", "16", "--blocks", "2"),
    *("--evaluate-every", "4", "--save-every", "3", "--backend", "eager", "--folder", "out"),
)


def test_only_the_place_knows_where_it_runs() -> None:
    tree = ast.parse((EXAMPLES / NAME).read_text())
    parts = [node for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)]
    by_name = {node.name: node for node in parts}
    assert {"GPT", "Trainer", "Data", "place", "compiled"} <= by_name.keys()
    asks = {name for name, node in by_name.items() if place_tests(node)}
    others = [node for name, node in by_name.items() if name not in ("place", "main")]
    names = {n.id for node in others for n in ast.walk(node) if isinstance(n, ast.Name)}
    assert asks == {"place"} and "dist" not in names


def last(shown: str) -> tuple[float, int]:
    loss, captures = re.findall(r"done: held out (\d+\.\d+); (\d+) captures", shown)[-1]
    return float(loss), int(captures)


@pytest.mark.gloo
def test_it_goes_on_at_another_layout(tmp_path: Path) -> None:
    shown = run(NAME, *SMALL, cwd=tmp_path)
    assert "compiling: there are no saved programs" in shown and "held out" in shown
    loss, captures = last(shown)
    written = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert captures == 2 and written == ["programs", "step_000003", "step_000006"]
    shutil.rmtree(tmp_path / "out" / "step_000006")
    launched = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    again = subprocess.run(
        [*launched, str(EXAMPLES / NAME), *SMALL], cwd=tmp_path, capture_output=True, text=True, timeout=200
    )
    assert again.returncode == 0, again.stdout[-4000:] + again.stderr[-4000:]
    assert "going on from out/step_000003" in again.stdout
    assert last(again.stdout)[0] == pytest.approx(loss, rel=1e-5)
