"""Weights by name into a step in one process: from files of each kind, and from dicts; nothing is half done."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphcomp as gc
from graphcomp.checkpoint import load_weights
from graphcomp.errors import CheckpointError, PlanError, StateError, StepError
from tests.checkpoint.model import batches, decoder, loss_fn, meta_decoder, step_of

safetensors = pytest.importorskip("safetensors.torch")


def state(seed: int = 3, **without: None) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in decoder(seed=seed).state_dict().items() if name != "head.weight"}


def one_file(folder: Path, tensors: dict[str, Tensor]) -> Path:
    safetensors.save_file(tensors, folder / "model.safetensors")
    return folder / "model.safetensors"


def a_folder(folder: Path, tensors: dict[str, Tensor]) -> Path:
    """In two files, with an index."""
    names = {name: f"model-{number % 2}.safetensors" for number, name in enumerate(tensors)}
    for file in set(names.values()):
        safetensors.save_file({name: tensors[name] for name in names if names[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    return folder


def of_torch(folder: Path, tensors: dict[str, Tensor]) -> Path:
    torch.save(tensors, folder / "weights.pt")
    return folder / "weights.pt"


def nested(folder: Path, tensors: dict[str, Tensor]) -> Path:
    torch.save({"state_dict": tensors, "epoch": 3}, folder / "last.pth")
    return folder


KINDS: list[Callable[[Path, dict[str, Tensor]], Path]] = [one_file, a_folder, of_torch, nested]


def assert_loaded(step: gc.CompiledStep, expected: dict[str, Tensor]) -> None:
    found = step.state_dict()
    assert list(found) == list(step.model.state_dict())
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert torch.equal(found["head.weight"], expected["embed.weight"])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("build", [decoder, meta_decoder])
def test_each_kind_of_file(kind: Any, build: Callable[[], nn.Module], tmp_path: Path) -> None:
    step = step_of(build())
    same = [id(p) for p in step.model.parameters()]
    assert load_weights(step, kind(tmp_path, state())) == ([], [])
    assert_loaded(step, state())
    assert same == [id(p) for p in step.model.parameters()]
    assert step.model.scale.ramp.tolist() == [0, 1, 2, 3, 4, 5]


def test_a_step_goes_on_with_them(tmp_path: Path) -> None:
    step = step_of(meta_decoder(0.0))
    load_weights(step, one_file(tmp_path, state()))
    expected = sum(loss_fn(decoder(0.0, 3)(b["tokens"]), b).total.detach() for b in batches(0))
    tokens = sum(batch["labels"].numel() for batch in batches(0))
    assert float(step(batches(0)).loss) == pytest.approx(float(expected) / tokens)


def test_only_what_is_asked_for_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    from graphcomp.checkpoint import files

    original = files._open_torch

    def opened(file: Path) -> Any:
        source = original(file)
        return files.Source(source.shapes, lambda name, rows: (read.append(name), source.read(name, rows))[1])

    monkeypatch.setattr(files, "_open_torch", opened)
    step = step_of(decoder())
    owned = {"embed.weight", "norm.bias"}
    monkeypatch.setattr(type(step.engine.preparation.owned), "holds", lambda self, name: name in owned)
    before = step.model.norm.weight.detach().clone()
    load_weights(step, of_torch(tmp_path, state()))
    assert set(read) == owned
    assert torch.equal(step.model.norm.weight, before)
    assert torch.equal(step.model.norm.bias, state()["norm.bias"])


def test_names_may_be_others(tmp_path: Path) -> None:
    step = step_of(meta_decoder())
    path = of_torch(tmp_path, {f"base.{name}": tensor for name, tensor in state().items()})
    load_weights(step, path, rename=lambda name: name.removeprefix("base."))
    assert_loaded(step, state())


def test_of_both_names_of_a_tied_tensor_the_last_counts_as_in_load_state_dict(tmp_path: Path) -> None:
    both = {**state(), "head.weight": state()["embed.weight"] + 1}
    step = step_of(decoder())
    load_weights(step, of_torch(tmp_path, both))
    expected = decoder()
    expected.load_state_dict(both)
    assert torch.equal(step.model.embed.weight, expected.embed.weight)


def test_other_dtypes_are_converted(tmp_path: Path) -> None:
    step = step_of(meta_decoder().to(torch.bfloat16))
    load_weights(step, of_torch(tmp_path, state()))
    assert torch.equal(step.model.embed.weight, state()["embed.weight"].to(torch.bfloat16))


@pytest.mark.parametrize("build", [decoder, meta_decoder])
def test_names_that_do_not_fit_change_nothing(build: Callable[[], nn.Module], tmp_path: Path) -> None:
    step = step_of(build())
    before = {name: tensor.clone() for name, tensor in step.model.state_dict().items()}
    wrong = state()
    del wrong["norm.bias"], wrong["layers.0.0.weight"]
    wrong["lm_head.bias"] = torch.ones(2)
    with pytest.raises(CheckpointError) as raised:
        load_weights(step, of_torch(tmp_path, wrong))
    assert str(raised.value).startswith(
        "the names do not fit the model: 2 names are missing; 1 name is not the model's\n"
        "  expected: 'layers.0.0.weight', 'norm.bias' as well\n"
        "  got: 'lm_head.bias' besides\n"
    )
    other = {**state(), "norm.bias": torch.ones(4)}
    with pytest.raises(CheckpointError, match=r"1 tensor of other shapes .*\n  got: 'norm.bias' \(4,\) in the place"):
        load_weights(step, of_torch(tmp_path, other))
    after = step.model.state_dict()
    assert all(b.is_meta if build is meta_decoder else torch.equal(after[name], b) for name, b in before.items())


def test_without_strict_the_rest_is_initialised_or_stays(tmp_path: Path) -> None:
    part = {name: tensor for name, tensor in state().items() if name.startswith("layers")}
    path = of_torch(tmp_path, {**part, "more": torch.ones(1)})
    step = step_of(meta_decoder())
    found = load_weights(step, path, strict=False)
    assert found.unexpected == ["more"]
    assert "embed.weight" in found.missing
    assert not any(p.is_meta for p in step.model.parameters())
    assert torch.equal(step.model.layers[0][0].weight, part["layers.0.0.weight"])
    assert step.model.norm.weight.unique().tolist() == [1.0]
    real = step_of(decoder())
    load_weights(real, path, strict=False)
    assert torch.equal(real.model.embed.weight, decoder().embed.weight)


def test_a_buffer_that_nothing_fills_is_named(tmp_path: Path) -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))
            self.register_buffer("ramp", torch.arange(3.0), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.weight * self.ramp).sum()

    with torch.device("meta"):
        model = Own()
    step = gc.compile_train_step(model, lambda out, _: gc.mean_loss(out), plan=gc.Plan(backend="eager", quiet=True))
    path = of_torch(tmp_path, {"weight": torch.ones(3)})
    with pytest.raises(StateError, match="nothing initialises buffer 'ramp' of Own"):
        load_weights(step, path)
    assert model.weight.is_meta

    def init(module: nn.Module) -> None:
        module.ramp.copy_(torch.arange(3.0))

    load_weights(step, path, init=init)
    assert model.ramp.tolist() == [0, 1, 2]


# ---- files that are none


def test_paths_that_hold_no_weights(tmp_path: Path) -> None:
    step = step_of(decoder())
    with pytest.raises(CheckpointError, match="there are no weights"):
        load_weights(step, tmp_path / "nowhere")
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(CheckpointError, match=r"holds no weights\n.*\n.*\n  got: notes\.txt"):
        load_weights(step, tmp_path)
    for name in ("a.pt", "b.pt"):
        torch.save(state(), tmp_path / name)
    with pytest.raises(CheckpointError, match=r"several sets of weights\n.*\n  got: a\.pt, b\.pt"):
        load_weights(step, tmp_path)
    torch.save({"epoch": 3}, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match=r"something else than a state dict\n.*\n.*\n  got: 'epoch': int"):
        load_weights(step, tmp_path / "a.pt")
    (tmp_path / "a.pt").write_text("no checkpoint")
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_weights(step, tmp_path / "a.pt")
    (tmp_path / "x.safetensors").write_text("no checkpoint")
    with pytest.raises(CheckpointError, match=r"cannot be read\n.*x\.safetensors"):
        load_weights(step, tmp_path / "x.safetensors")


def test_without_the_package_safetensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    path = one_file(tmp_path, state())
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(CheckpointError, match=r"needs the package safetensors\n.*\n  what to do: pip install"):
        load_weights(step_of(decoder()), path)


# ---- dicts


def test_state_dict_is_the_models_and_shares_its_memory() -> None:
    step = step_of(decoder())
    found, expected = step.state_dict(), step.model.state_dict()
    assert list(found) == list(expected)
    assert all(found[name].data_ptr() == tensor.data_ptr() for name, tensor in expected.items())
    assert not any(tensor.requires_grad for tensor in found.values())
    with pytest.raises(StepError, match=r"'embed\.weight' is still on the meta device"):
        step_of(meta_decoder()).state_dict()


@pytest.mark.parametrize("build", [decoder, meta_decoder])
def test_load_state_dict(build: Callable[[], nn.Module]) -> None:
    step = step_of(build())
    assert step.load_state_dict(state()) == ([], [])
    assert_loaded(step, state())
    with pytest.raises(CheckpointError, match="2 names are not the model's"):
        step.load_state_dict({**state(), "a": torch.ones(1), "b": torch.ones(1)})
    with pytest.raises(CheckpointError, match="'a' of the state dict is no tensor"):
        step.load_state_dict({**state(), "a": 3})
    assert step.load_state_dict({"norm.bias": state(4)["norm.bias"]}, strict=False)[1] == []
    assert torch.equal(step.model.norm.bias, state(4)["norm.bias"])


class Counts(nn.Module):
    """Keeps something besides tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1)
        self.seen = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).sum()

    def get_extra_state(self) -> dict[str, int]:
        return {"seen": self.seen}

    def set_extra_state(self, value: dict[str, int]) -> None:
        self.seen = value["seen"]


def test_extra_state_of_modules_comes_along(tmp_path: Path) -> None:
    plan = gc.Plan(backend="eager", quiet=True)
    one, other = (gc.compile_train_step(Counts(), lambda out, _: gc.mean_loss(out), plan=plan) for _ in range(2))
    one.model.seen = 7
    other.load_state_dict(one.state_dict())
    assert other.model.seen == 7
    one.model.seen = 9
    gc.checkpoint.save(one, tmp_path / "saved")
    gc.checkpoint.load(other, tmp_path / "saved")
    assert other.model.seen == 9


def test_extra_state_that_is_missing_or_foreign(tmp_path: Path) -> None:
    step = gc.compile_train_step(Counts(), lambda out, _: gc.mean_loss(out), plan=gc.Plan(backend="eager", quiet=True))
    whole = step.state_dict()
    tensors = {key: value + 1 for key, value in whole.items() if key != "_extra_state"}
    before = step.model.linear.weight.clone()
    with pytest.raises(CheckpointError, match="1 name is missing"):
        step.load_state_dict(tensors)
    with pytest.raises(CheckpointError, match="1 name is not the model's"):
        step.load_state_dict({**whole, "head._extra_state": {"seen": 3}})
    torch.save(whole | {"_extra_state": torch.ones(1)}, tmp_path / "weights.pt")
    with pytest.raises(CheckpointError, match="1 name is missing; 1 name is not the model's"):
        gc.checkpoint.load_weights(step, tmp_path / "weights.pt")
    assert torch.equal(step.model.linear.weight, before)
    found = step.load_state_dict({**tensors, "head._extra_state": {"seen": 3}}, strict=False)
    assert found == (["_extra_state"], ["head._extra_state"])
    assert torch.equal(step.model.linear.weight, before + 1) and step.model.seen == 0


# ---- materialize


def test_materialize_leaves_what_is_real() -> None:
    step = step_of(decoder())
    before = {name: tensor.clone() for name, tensor in step.model.state_dict().items()}
    step.materialize(seed=4)
    assert all(torch.equal(tensor, before[name]) for name, tensor in step.model.state_dict().items())
    with pytest.raises(PlanError, match="the seed of materialize is a whole number"):
        step.materialize(seed=1.5)


def test_captured_on_meta_it_is_not_captured_again() -> None:
    step = step_of(meta_decoder())
    step.compile(batches(0)[0])
    with pytest.raises(StepError, match="is still on the meta device"):
        step(batches(0))
    with pytest.raises(StepError, match="is still on the meta device"):
        step.evaluate(batches(0))
    assert int(step.count(batches(0))["loss"]) == 60
    traces = step.stats.traces
    step.materialize()
    step(batches(0))
    assert (step.stats.traces, step.stats.steps) == (traces, 1)
    assert all(p.grad is not None for name, p in step.named_parameters() if p.requires_grad and "unused" not in name)
