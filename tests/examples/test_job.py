"""The job in phases: begun by one process, gone on with by two pipelines of two stages that hold rows of parameters."""

from __future__ import annotations

import json
import runpy
import shutil
from pathlib import Path

import pytest

from tests.examples.scripts import run_script
from tests.examples.test_examples import EXAMPLES

JOB = """
model = {width = 16, blocks = 1, longest = 80}
training = {steps = 4, documents = 80, rows = 2, log_every = 1, save_every = 2}
parallel = {backend = "eager"}
"""


def numbers(folder: Path) -> dict[int, tuple[float, float, float]]:
    """Loss, gradient norm and learning rate of each step."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: (line["loss"], line["norm"], line["rate"]) for line in lines}


def start(processes: int, folder: Path, base: Path, **parallel: object) -> dict[int, tuple[float, float, float]]:
    """Two files: the second changes what the first says."""
    own = "".join(f"{name} = {json.dumps(value)}\n" for name, value in parallel.items())
    changes = base / f"{folder.name}.toml"
    changes.write_text(f"[training]\nfolder = {json.dumps(str(folder))}\n[parallel]\n{own}")
    run_script("08_job.py", processes, str(base / "job.toml"), str(changes))
    return numbers(folder)


@pytest.mark.gloo
def test_a_job_goes_on_at_another_layout(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(JOB)
    whole, other = tmp_path / "whole", tmp_path / "other"
    expected = start(1, whole, tmp_path)
    assert sorted(path.name for path in whole.iterdir()) == ["metrics.jsonl", "step_000002", "step_000004"]
    assert list(expected) == [1, 2, 3, 4] and expected[4][0] < expected[1][0]
    shutil.copytree(whole / "step_000002", other / "step_000002")
    found = start(4, other, tmp_path, pipeline=2, parameters="shard")
    assert list(found) == [3, 4]
    for step, values in found.items():
        assert values == pytest.approx(expected[step], rel=1e-5)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[parallel]\nstages = 2", r"job.toml \[parallel\]: unknown key 'stages'; known are pipeline, schedule, "),
        ("[trainer]\nsteps = 2", "job.toml: unknown key 'trainer'; known are model, training, parallel"),
    ],
)
def test_a_key_that_no_config_has_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, says: str
) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    (tmp_path / "job.toml").write_text(text)
    config = runpy.run_path(str(EXAMPLES / "08_job.py"))["Config"]
    with pytest.raises(SystemExit, match=says):
        config().changed(str(tmp_path / "job.toml"))
