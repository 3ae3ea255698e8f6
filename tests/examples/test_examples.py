"""Every example runs to its end, with small settings.

Those whose processes show something are programs of their own. Others run here under the name `__main__`, and their
processes are copies of the one that all tests copy: importing torch takes longer than what they compute.
"""

from __future__ import annotations

import importlib.util
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.examples.scripts import EXAMPLES, run_script, showing


def run(name: str, *options: str, cwd: Path) -> str:
    """The output of an example; fails with it if the exit code is not 0."""
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *options],
        cwd=cwd,
        env={**environment, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout[-6000:]}\n{done.stderr[-6000:]}"
    return done.stdout


class Shown:
    """Runs an example in this process, from an empty folder, and gives its output, not that of its processes."""

    def __init__(self, patch: pytest.MonkeyPatch, output: pytest.CaptureFixture[str]) -> None:
        self.patch, self.output = patch, output

    def __call__(self, name: str, *options: str) -> str:
        self.patch.setattr(sys, "argv", [name, *options])
        left = None
        try:
            runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        except SystemExit as end:
            left = end.code
        shown = self.output.readouterr()
        assert not left, f"exit code {left}\n{shown.out[-6000:]}\n{shown.err[-6000:]}"
        return shown.out


@pytest.fixture
def shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Shown:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return Shown(monkeypatch, capfd)


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SMALL = ("--steps", "20", "--width", "32", "--blocks", "2", "--longest", "96", "--microbatches", "3")


def dumped(folder: Path, rank: int) -> dict[str, str]:
    """What a rank wrote, by what it is."""
    files = (folder / "runs").glob(f"*/rank_{rank}/[0-9]*.txt")
    return {path.name.split("_", 1)[1].removesuffix(".txt"): path.read_text() for path in files}


@pytest.mark.gloo
def test_train_gpt_over_data_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    options = (*SMALL, "--backend", "eager", "--data-ranks", "2", "--parameters", "shard")
    text, _ = run_script("01_train_gpt.py", 2, *options, watching=showing)
    assert "one step, compiled and eager" in text and "head.weight" in text
    first, second = dumped(tmp_path, 0), dumped(tmp_path, 1)
    assert {"plan", "joint", "stage_0_forward", "stage_0_unshard", "stage_0_reduce", "schedule", "rank_0"} <= set(first)
    assert first.keys() == second.keys()
    # The ranks have 2 microbatches and 1, and examples of other sizes; their programs are the same.
    assert {name for name in first if first[name] != second[name]} == {"plan", "schedule", "rank_0"}


@pytest.mark.gloo
@pytest.mark.inductor
def test_train_gpt_compiled(tmp_path: Path) -> None:
    assert "1 capture and 2 compiled programs served all lengths" in run("01_train_gpt.py", *SMALL, cwd=tmp_path)
    assert [f"rank_{rank}" in dumped(tmp_path, rank) for rank in (0, 1)] == [True, True]


@pytest.mark.gloo
def test_huggingface(shown: Shown) -> None:
    pytest.importorskip("transformers")
    text = shown("02_huggingface.py", "--steps", "2", "--stages", "1", "2")
    assert "llama  2 stage(s)" in text and "largest relative difference" in text


@pytest.mark.gloo
@pytest.mark.wide
def test_huggingface_in_four_stages(shown: Shown) -> None:
    pytest.importorskip("transformers")
    assert "llama  4 stage(s)" in shown("02_huggingface.py", "--steps", "2", "--stages", "2", "4")


def test_inspect(shown: Shown) -> None:
    text = shown("03_inspect.py")
    for words in ("param hidden.weight", "activation 0>1", "denominator loss"):
        assert words in text


@pytest.mark.gloo
def test_packed_documents(shown: Shown) -> None:
    text = shown("04_packed_documents.py", *SMALL, "--capacity", "160", "--backend", "eager")
    assert "packs of " in text and "relative difference" in text
    assert "1 capture(s)" in text or "2 capture(s)" in text  # a pack that holds one document has its own


def test_the_table_of_a_pack_leads_to_its_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))  # as for a program that is started there
    texts = [b"def one():", b"def two(x): return x", b"def f(): ..."]
    batch = load("04_packed_documents").pack(texts)
    assert batch["table"].shape == (3, 20) and batch["tokens"].shape == (42,)
    for text, row in zip(texts, batch["table"], strict=True):
        places = row[: len(text)]
        assert bytes(batch["labels"][places].tolist()) == text
        assert bytes(batch["tokens"][places].tolist()) == b"\0" + text[:-1]
        assert batch["positions"][places].tolist() == list(range(len(text)))
        assert len(set(batch["documents"][places].tolist())) == 1


def test_the_text_of_a_microbatch_reads_back_from_its_labels() -> None:
    text = load("stdlib_text")
    texts = text.documents(limit=50, longest=200)
    assert len(texts) == 50 and all(40 <= len(each) <= 200 and each.startswith(b"def ") for each in texts)
    batch = text.pad(texts[:3], torch.device("cpu"))
    for row, each in enumerate(texts[:3]):
        labels = batch["labels"][row]
        assert bytes(labels[labels != text.IGNORED].tolist()) == each
        assert batch["tokens"][row, 0] == 0
        assert bytes(batch["tokens"][row, 1 : len(each)].tolist()) == each[:-1]


def test_data_is_the_same_every_time_and_ragged() -> None:
    text = load("stdlib_text")
    texts = text.documents(limit=50, longest=200)
    one, two = (next(text.steps(texts, 4, 2, 7, torch.device("cpu"))) for _ in range(2))
    assert all(torch.equal(a["tokens"], b["tokens"]) for a, b in zip(one, two, strict=True))
    assert len({batch["tokens"].shape for batch in one}) > 1


@pytest.mark.skipif(importlib.util.find_spec("silero_vad") is None, reason="needs the package silero-vad")
def test_pretrained(shown: Shown) -> None:
    """Real weights: they know silence, and fine-tuning in two stages leaves them what eager makes of them."""
    text = shown("06_pretrained.py", "--steps", "4")
    found = re.search(r"silence is speech with a probability of ([\d.]+)", text)
    assert found is not None and float(found[1]) < 0.1
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+) in two stages", text)]
    assert len(losses) == 4 and losses[-1] < 0.2 * losses[0]


@pytest.mark.gloo
def test_tensor_parallel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text, *_ = run_script("07_tensor_parallel.py", 4, watching=showing)
    assert "tensor ranks: the same microbatches" in text and "step 4: loss" in text


def test_hf_trainer(shown: Shown) -> None:
    """Trained by the Trainer as it is and with compiled steps: the same losses, norms and evaluation."""
    for needed in ("transformers", "accelerate"):
        pytest.importorskip(needed)
    text = shown("09_hf_trainer.py", "--steps", "3", "--backend", "eager", "--folder", "out")
    assert "6 compiled steps, 1 capture(s)" in text
    assert text.count("'grad_norm'") == 6 and text.count("'eval_loss'") == 2
