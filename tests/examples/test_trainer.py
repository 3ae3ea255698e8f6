"""The example trainer, as a script at every layout: one curve, and a run that is killed comes to the same end.

Each process runs the file itself, as torchrun would: only what it imports is there already.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import runpy
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

import graphcomp as gc
from tests.checkpoint.test_processes import RealBytes, full, local_bytes
from tests.examples.scripts import EXAMPLES, run_script

pytestmark = [
    pytest.mark.gloo,
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),  # the checkpoints are read in this process
]

NAME = "05_trainer.py"
LAYOUTS = {"one process": (1, 1), "dp2": (2, 2), "pp2": (2, 1), "pp4": (4, 1), "pp2 x dp2": (4, 2)}
"""Processes, and data ranks among them."""
DROPOUT = "pp2 with dropout"  # its masks are not those that one process draws
STEPS, SAVED, KILLED = 7, 4, 5
SMALL = (
    *("--steps", str(STEPS), "--microbatches", "4", "--rows", "2", "--documents", "100", "--longest", "80"),
    *("--width", "16", "--blocks", "1"),
    *("--log-every", "1", "--evaluate-every", "3", "--save-every", str(SAVED), "--backend", "eager"),
)


class Watch:
    """What a test sees of the step in the script: its memory, and where it is killed."""

    def __init__(self, kill: bool) -> None:
        self.kill, self.found = kill, {}
        self.step: gc.CompiledStep | None = None

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(gc.CompiledStep, "materialize", self.materialize(gc.CompiledStep.materialize))
            patch.setattr(gc.CompiledModel, "forward", self.forward(gc.CompiledModel.forward))
            patch.setattr(gc.checkpoint, "load", self.load(gc.checkpoint.load))
            yield

    def materialize(self, original: Callable[..., None]) -> Callable[..., None]:
        def materialize(step: gc.CompiledStep, *args: Any, **options: Any) -> None:
            self.step = step
            with RealBytes() as counted:
                original(step, *args, **options)
            self.found["built"] = counted.peak
            self.found["first values"] = {name: full(p) for name, p in step.named_parameters()}

        return materialize

    def load(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def load(*args: Any, **options: Any) -> Any:
            with RealBytes() as counted:
                extra = original(*args, **options)
            self.found["loaded"] = counted.peak
            return extra

        return load

    def forward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(model: gc.CompiledModel, batch: Any) -> Any:
            if self.kill and torch.is_grad_enabled() and model.step.stats.steps == KILLED - 1:
                model.step.on_microbatch(lambda _: os.kill(os.getpid(), signal.SIGKILL))
            return original(model, batch)

        return forward

    def holds(self) -> dict[str, Any]:
        """What the rank holds at the end."""
        step = self.step
        mine = {name: local_bytes(p) for name, p in step.named_parameters()}
        sizes = {name: p.numel() * p.element_size() for name, p in step.model.named_parameters()}
        real = {name for name, p in step.model.named_parameters() if not p.is_meta}
        return {**self.found, "mine": mine, "sizes": sizes, "real": real, "traces": step.stats.traces}


@contextlib.contextmanager
def watched(kill: bool) -> Iterator[Callable[[], dict[str, Any]]]:
    watch = Watch(kill)
    with watch.on():
        yield watch.holds


def run(layout: str, folder: Path, kill: bool = False) -> list[dict[str, Any]]:
    processes, data_ranks = LAYOUTS[layout.removesuffix(" with dropout")]
    options = (
        *SMALL,
        "--dropout",
        "0.1" if layout == DROPOUT else "0.0",
        "--folder",
        str(folder),
        "--data-ranks",
        str(data_ranks),
        "--schedule",
        "gpipe" if layout == "pp4" else "1f1b",
    )
    return run_script(NAME, processes, *options, watching=functools.partial(watched, kill))


def logged(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def curve(folder: Path) -> dict[tuple[str, int], float]:
    """Losses and gradient norms of the steps, and evaluations; what was done twice as it was the second time."""
    names = ("loss", "norm", "held_out")
    steps = [line for line in logged(folder) if "step" in line]
    return {(name, line["step"]): line[name] for line in steps for name in names if name in line}


def saved(folder: Path) -> dict[str, Tensor]:
    """All tensors of the last checkpoint, parameters and the optimizer's, read by torch alone; and random streams."""
    last = folder / f"step_{STEPS:06d}"
    reader = dcp.FileSystemReader(last)
    forms = reader.read_metadata().state_dict_metadata
    tensors = {key: torch.empty(one.size, dtype=one.properties.dtype) for key, one in forms.items()}
    dcp.load(tensors, storage_reader=reader, no_dist=True)
    streams = torch.load(last / "graphcomp.pt", weights_only=True)["random"]
    return tensors | {f"random.{rank}.{kind}": state for rank, own in enumerate(streams) for kind, state in own.items()}


@dataclass(frozen=True)
class Unbroken:
    curve: dict[tuple[str, int], float]
    saved: dict[str, Tensor]
    ranks: list[dict[str, Any]]
    programs: Path


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Unbroken]:
    """A run from its first step to its last, once for each layout."""

    @functools.cache
    def at(layout: str) -> Unbroken:
        folder = tmp_path_factory.mktemp("unbroken")
        ranks = run(layout, folder)
        return Unbroken(curve(folder), saved(folder), ranks, folder / "programs")

    return at


@pytest.mark.parametrize(
    "layout",
    [
        "one process",
        *(pytest.param(layout, marks=pytest.mark.wide) for layout in ("dp2", "pp2", "pp4")),
        "pp2 x dp2",
        DROPOUT,
    ],
)
def test_killed_and_resumed_it_equals_the_unbroken_run(
    layout: str, unbroken: Callable[[str], Unbroken], tmp_path: Path
) -> None:
    whole = unbroken(layout)
    shutil.copytree(whole.programs, tmp_path / "programs")  # only to save time: they hold no values
    with pytest.raises(gc.errors.RankFailure, match="killed by SIGKILL"):
        run(layout, tmp_path, kill=True)
    assert [line["step"] for line in logged(tmp_path) if "loss" in line] == list(range(1, KILLED))
    assert sorted(path.name for path in tmp_path.glob("step_*")) == [f"step_{SAVED:06d}"]

    ranks = run(layout, tmp_path)
    assert curve(tmp_path) == whole.curve
    after = saved(tmp_path)
    assert after.keys() == whole.saved.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in whole.saved.items())
    streams = sum(state.numel() for name, state in after.items() if name.startswith("random."))
    for rank in ranks:
        # AdamW's two averages and a count beside each parameter; one tensor on its way from the file, twice.
        state = 3 * sum(rank["mine"].values()) + 4 * len(rank["mine"])
        assert rank["loaded"] <= state + 2 * max(rank["sizes"].values()) + streams
        assert rank["real"] == rank["mine"].keys()
    if layout == DROPOUT:  # the streams are part of what is gone on with
        assert not torch.equal(after["random.0.cpu"], unbroken("pp2").saved["random.0.cpu"])
        assert whole.curve["loss", 1] != unbroken("pp2").curve["loss", 1]


def determined(name: str, tensor: Tensor) -> Sequence[Tensor]:
    """All but the bias of keys, which softmax takes out: its gradient is rounding, which AdamW makes large."""
    return tensor.chunk(3)[::2] if name.endswith("qkv.bias") else [tensor]


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "one process"])
def test_every_layout_has_the_curve_of_one_process(layout: str, unbroken: Callable[[str], Unbroken]) -> None:
    alone, here = unbroken("one process"), unbroken(layout)
    assert len(alone.curve) == 2 * STEPS + STEPS // 3
    assert here.curve == pytest.approx(alone.curve, abs=1e-5, rel=0)
    for name, tensor in alone.saved.items():
        if name.startswith("model."):
            for found, expected in zip(determined(name, here.saved[name]), determined(name, tensor), strict=True):
                torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    losses = [loss for (name, _), loss in alone.curve.items() if name == "loss"]
    assert losses[-1] < 0.95 * losses[0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rank_builds_and_holds_its_own_part_with_the_same_first_values(
    layout: str, unbroken: Callable[[str], Unbroken]
) -> None:
    first = unbroken("one process").ranks[0]["first values"]
    processes, data_ranks = LAYOUTS[layout]
    ranks = unbroken(layout).ranks
    total, largest = sum(ranks[0]["sizes"].values()), max(ranks[0]["sizes"].values())
    for rank in ranks:
        own = sum(rank["mine"].values())
        assert own <= rank["built"] <= own + largest
        assert rank["real"] == rank["mine"].keys()
        assert all(torch.equal(tensor, first[name]) for name, tensor in rank["first values"].items())
        assert processes == data_ranks or own < 0.75 * total
        assert rank["traces"] == 2  # training and evaluation, whatever the lengths
    assert sum(sum(rank["mine"].values()) for rank in ranks) == data_ranks * total


def test_the_same_data_at_every_layout() -> None:
    """What the data ranks take are parts of one sequence, one behind the other."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        trainer = SimpleNamespace(**runpy.run_path(str(EXAMPLES / NAME)))
    config = trainer.Config(documents=100, longest=80)
    places = [trainer.Place(gc.Plan(), torch.device("cpu"), data_rank, 2) for data_rank in range(2)]
    texts = trainer.documents(config.documents, config.longest)
    for step in itertools.islice(trainer.groups(texts, config.microbatches, config.rows, config.seed), 3):
        shares = [place.share(step) for place in places]
        assert [len(share) for share in shares] == [2, 2] and [*shares[0], *shares[1]] == step
        assert trainer.Place(gc.Plan(), torch.device("cpu")).share(step) == step


def test_it_goes_on_at_another_layout(unbroken: Callable[[str], Unbroken], tmp_path: Path) -> None:
    """From two stages to one process, without the programs, which are of the other layout."""
    whole = unbroken("pp2")
    source = whole.programs.parent
    shutil.copytree(source / f"step_{SAVED:06d}", tmp_path / f"step_{SAVED:06d}")
    unfinished = tmp_path / f"step_{STEPS:06d}.saving"  # as it is left where a run was killed while it saved
    unfinished.mkdir()
    (unfinished / "graphcomp.pt").write_bytes(b"")
    run("one process", tmp_path)
    assert not unfinished.exists()
    assert [line["step"] for line in logged(tmp_path) if "loss" in line] == list(range(SAVED + 1, STEPS + 1))
    assert curve(tmp_path) == pytest.approx(
        {key: value for key, value in whole.curve.items() if key[1] > SAVED}, abs=1e-5, rel=0
    )
