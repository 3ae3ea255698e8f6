"""Checkpoints of one process: going on equals the unbroken run, and what does not fit is refused before any effect."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

import graphcomp as gc
from graphcomp.checkpoint import load, save, save_async
from graphcomp.checkpoint.optimizers import merged
from graphcomp.ending import Ending
from graphcomp.errors import CheckpointError
from tests.checkpoint.model import Trainer, batches, decoder, meta_decoder, step_of

OPTIMIZERS = {
    "AdamW": torch.optim.AdamW,
    "SGD": lambda groups, lr: torch.optim.SGD(groups, lr=lr, momentum=0.9),
    "plain SGD": torch.optim.SGD,
    "Adagrad": torch.optim.Adagrad,
}


@pytest.fixture(scope="module")
def trainer() -> Iterator[Trainer]:
    """One that has done two steps; to be looked at only."""
    torch.manual_seed(0)
    found = Trainer(step_of(decoder()))
    found.train(range(2))
    yield found


def state_of(step: gc.CompiledStep) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in step.state_dict().items()}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_going_on_equals_the_unbroken_run(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    one = Trainer(step_of(decoder()), OPTIMIZERS[kind])
    one.train(range(2))
    one.save(tmp_path / "saved")
    losses = one.train(range(2, 4))
    torch.manual_seed(2)
    other = Trainer(step_of(meta_decoder()), OPTIMIZERS[kind])
    other.load(tmp_path / "saved")
    assert other.step.stats.steps == 2
    assert other.train(range(2, 4)) == losses
    values = state_of(other.step)
    assert all(torch.equal(tensor, values[name]) for name, tensor in state_of(one.step).items())
    for found, expected in zip(other.optimizer.param_groups, one.optimizer.param_groups, strict=True):
        assert {**found, "params": None} == {**expected, "params": None}


def test_what_is_saved_in_the_background_is_what_there_was(trainer: Trainer, tmp_path: Path) -> None:
    trained = Trainer(step_of(copy.deepcopy(trainer.step.model)))
    trained.train([5])
    expected, extra = state_of(trained.step), {"list": [1]}
    moments = {k: v.clone() for k, v in trained.optimizer.state[trained.step.model.norm.bias].items()}
    futures = [save_async(trained.step, tmp_path / name, trained.optimizer, extra) for name in "ab"]
    extra["list"].append(2)
    trained.train([6, 7])
    save(trained.step, tmp_path / "c", trained.optimizer)
    assert all(future.done() for future in futures)
    for name in "ab":
        other = Trainer(step_of(decoder(seed=9)))
        assert load(other.step, tmp_path / name, other.optimizer) == {"list": [1]}
        assert all(torch.equal(tensor, expected[key]) for key, tensor in state_of(other.step).items())
        held = other.optimizer.state[other.step.model.norm.bias]
        assert all(torch.equal(held[key], value) for key, value in moments.items())


def test_names_in_the_folder_are_the_models(trainer: Trainer, tmp_path: Path) -> None:
    save(trainer.step, tmp_path / "saved", trainer.optimizer)
    found = dcp.FileSystemReader(tmp_path / "saved").read_metadata().state_dict_metadata
    model = {name.removeprefix("model.") for name in found if name.startswith("model.")}
    assert model == set(trainer.step.state_dict()) - {"head.weight"}
    assert "optimizer.state.layers.0.0.weight.exp_avg" in found
    whole = {"model": {"norm.bias": torch.zeros(6, dtype=torch.float64)}}
    dcp.load(whole, checkpoint_id=tmp_path / "saved", no_dist=True)
    assert torch.equal(whole["model"]["norm.bias"], trainer.step.model.norm.bias)


def test_a_step_that_failed_does_not_count() -> None:
    step = step_of(decoder())
    step(batches(0))
    with pytest.raises(gc.errors.BatchError):
        step([])
    with pytest.raises(RuntimeError), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ending, "finish", lambda *_: (_ for _ in ()).throw(RuntimeError("late")))
        step(batches(0))
    step.evaluate(batches(0))
    step.count(batches(0))
    assert step.stats.steps == 1


def test_the_random_stream_goes_on(tmp_path: Path) -> None:
    step = step_of(decoder())
    torch.manual_seed(4)
    save(step, tmp_path / "saved")
    expected = torch.rand(3)
    load(step, tmp_path / "saved")
    assert torch.equal(torch.rand(3), expected)


def test_without_an_optimizer_and_into_another_order_of_groups(trainer: Trainer, tmp_path: Path) -> None:
    trainer.save(tmp_path / "saved")
    step = step_of(decoder(seed=9))
    load(step, tmp_path / "saved")
    assert all(torch.equal(t, state_of(step)[name]) for name, t in state_of(trainer.step).items())
    named = list(step.named_parameters())
    small = [p for _, p in named if p.dim() <= 1]
    large = [p for _, p in named if p.dim() > 1]
    optimizer = torch.optim.AdamW([{"params": small}, {"params": large[::-1]}], lr=9.0)
    load(step, tmp_path / "saved", optimizer)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.0, 0.1]
    assert [group["lr"] for group in optimizer.param_groups] == [0.0025, 0.0025]
    for name, p in named:
        kept = trainer.optimizer.state.get(dict(trainer.step.model.named_parameters())[name], {})
        assert kept.keys() == optimizer.state[p].keys() if kept else p not in optimizer.state
        assert all(torch.equal(optimizer.state[p][key], value) for key, value in kept.items())


def test_groups_of_several_ranks_become_one_where_their_options_are_equal() -> None:
    def part(names: list[str], decay: float) -> dict[str, Any]:
        groups = [{"names": names, "options": {"lr": 1.0, "weight_decay": decay}}]
        return {"kind": "SGD", "tensors": {names[0]: ["m"]}, "numbers": {names[0]: {}}, "groups": groups}

    found = merged([part(["a", "b"], 0.1), None, part(["b", "c"], 0.1), part(["d"], 0.2)])
    assert found is not None
    assert [(group["names"], group["options"]["weight_decay"]) for group in found["groups"]] == [
        (["a", "b", "c"], 0.1),
        (["d"], 0.2),
    ]
    assert list(found["tensors"]) == ["a", "b", "d"]
    assert merged([None, None]) is None


def test_a_damaged_file_is_named(trainer: Trainer, tmp_path: Path) -> None:
    save(trainer.step, tmp_path / "saved")
    (tmp_path / "saved" / "__0_0.distcp").write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match=r"the checkpoint cannot be read\n  where: .*saved"):
        load(step_of(decoder()), tmp_path / "saved")


# ---- one in the place of another


def test_the_old_one_stays_if_the_new_one_fails(
    trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "saved"
    trainer.save(folder)
    before = (folder / "graphcomp.pt").read_bytes()

    def broken(*_: Any, **__: Any) -> None:
        raise OSError("no space left")

    for name in ("write_data", "finish"):
        with monkeypatch.context() as patch:
            patch.setattr(dcp.FileSystemWriter, name, broken)
            with pytest.raises(CheckpointError, match=r"not written\n  where: rank 0\n  got: OSError: no space left"):
                trainer.save(folder)
            with pytest.raises(CheckpointError, match="no space left"):
                save_async(trainer.step, folder).result()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", broken)
        with pytest.raises(CheckpointError, match="no space left"):
            trainer.save(folder)
    assert (folder / "graphcomp.pt").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]
    trainer.save(folder)
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


def test_a_job_that_ended_while_writing_or_putting(trainer: Trainer, tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    (tmp_path / "saved.saving").mkdir()
    (tmp_path / "saved.saving" / "part").write_text("")
    trainer.save(folder)
    assert not (folder / "part").exists()
    folder.rename(tmp_path / "saved.old")
    load(step_of(decoder()), folder)
    trainer.save(folder)
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


def test_a_folder_of_something_else_is_left_alone(trainer: Trainer, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(CheckpointError, match="the place of the checkpoint is taken by something else"):
        trainer.save(tmp_path)
    assert (tmp_path / "thesis.tex").exists()


# ---- refused


def test_what_does_not_fit_changes_nothing(trainer: Trainer, tmp_path: Path) -> None:
    trainer.save(tmp_path / "saved")
    save(trainer.step, tmp_path / "bare")
    other = Trainer(step_of(decoder(seed=9)))
    before = state_of(other.step)
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        other.load(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="the checkpoint holds no optimizer"):
        other.load(tmp_path / "bare")
    parameters = list(other.step.parameters())
    for optimizer, says in (
        (torch.optim.SGD(parameters), "the state of another optimizer"),
        (torch.optim.AdamW(parameters), "group 0 of the optimizer is none of the checkpoint's"),
        (torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))]), "holds 1 parameters that are not the model's"),
    ):
        with pytest.raises(CheckpointError, match=says):
            load(other.step, tmp_path / "saved", optimizer)
    smaller = decoder()
    del smaller.layers[3]
    with pytest.raises(CheckpointError, match="4 names are not the model's"):
        load(step_of(smaller), tmp_path / "saved")
    assert all(torch.equal(tensor, before[name]) for name, tensor in state_of(other.step).items())
    assert other.step.stats.steps == 0


def test_extra_must_be_plain(trainer: Trainer, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="`extra`, or a number that the optimizer holds, cannot be saved"):
        save(trainer.step, tmp_path / "saved", extra=trainer)
    foreign = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
    with pytest.raises(CheckpointError, match="holds 1 parameters that are not the model's"):
        save(trainer.step, tmp_path / "saved", foreign)
    assert not list(tmp_path.iterdir())
