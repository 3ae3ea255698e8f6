"""Saved programs: a second start captures nothing and computes the same bits; whatever differs is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphcomp as gc
from graphcomp import stored
from graphcomp.capture.guards import ModelGuard
from graphcomp.capture.spelled import spelled
from graphcomp.errors import ArtifactError, StepError
from tests.trainer.speaking import Several, built, texts
from tests.zoo import ZOO

EAGER = gc.Plan(backend="eager", quiet=True)


@pytest.fixture(autouse=True)
def source_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read once: the tree may be edited while tests run."""
    text = stored._own_source()
    monkeypatch.setattr(stored, "_own_source", lambda: text)


class Net(nn.Module):
    """With an attribute, a function that it calls, a tensor that it holds by itself, dropout and a running mean."""

    def __init__(self, scale: float = 2.0, width: int = 8, act: Callable[[Tensor], Tensor] = torch.tanh) -> None:
        super().__init__()
        self.scale, self.act, self.offset = scale, act, torch.full((3,), 0.5)
        self.options = SimpleNamespace(inner=SimpleNamespace(rate=1.0))
        self.body = nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width), nn.Dropout(0.3), nn.Linear(width, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.body(x)) * self.scale + self.offset


def loss_fn(output: Tensor, batch: dict[str, Tensor]) -> gc.TokenLoss:
    return gc.TokenLoss((output - batch["goal"]).square().sum(), batch["goal"].shape[0])


def other_loss(output: Tensor, batch: dict[str, Tensor]) -> gc.TokenLoss:
    return gc.TokenLoss((output - batch["goal"]).abs().sum(), batch["goal"].shape[0])


def net(**options: Any) -> Net:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return Net(**options)


def batches(*rows: int) -> list[dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(sum(rows))
    return [{"x": torch.randn(n, 3, generator=draw), "goal": torch.randn(n, 3, generator=draw)} for n in rows]


def trained(step: gc.CompiledStep, *rows: int) -> tuple[Any, ...]:
    torch.manual_seed(7)
    losses = [step(batches(*rows)).loss.item(), step.evaluate(batches(*rows)).loss.item()]
    return losses, {name: p.grad.clone() for name, p in step.model.named_parameters()}, dict(step.model.named_buffers())


def same(one: tuple[Any, ...], two: tuple[Any, ...]) -> None:
    assert one[0] == two[0]
    for first, second in zip(one[1:], two[1:], strict=True):
        assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def saved(folder: Path, model: nn.Module, plan: gc.Plan = EAGER) -> tuple[Any, ...]:
    step = gc.compile_train_step(model, loss_fn, plan=plan)
    found = trained(step, 4, 6)
    assert step.stats.traces == 2
    assert step.save(folder) == folder / "rank_0.programs"
    return found


def test_a_second_start_captures_nothing(tmp_path: Path) -> None:
    found = saved(tmp_path, net())
    model = net()
    step = gc.load(tmp_path, model, loss_fn, plan=EAGER)
    same(found, trained(step, 4, 6))
    assert (step.stats.traces, step.stats.steps) == (0, 1)
    # What it holds by itself is read anew; a new kind of batch, and another mode, are captured as ever.
    model.offset.add_(1.0)
    after, before = step.evaluate(batches(5)).loss.item(), gc.compile_train_step(net(), loss_fn, plan=EAGER)
    assert after != before.evaluate(batches(5)).loss.item()
    step(batches(9, 2))
    assert step.stats.traces == 0
    model.eval()
    step(batches(3))
    assert step.stats.traces == 1
    assert step.explain() and step.dump(tmp_path / "texts")
    step.save(tmp_path)
    again = gc.load(tmp_path, net().eval(), loss_fn, plan=EAGER)
    again(batches(3))
    assert again.stats.traces == 0


def test_a_cut_model_and_the_trainers_view(tmp_path: Path) -> None:
    first = gc.compile(built(Several), plan=EAGER)
    batch = first.prepare_batch(texts(5))
    first.forward(batch).loss.backward()
    first.step.save(tmp_path)
    second = gc.compile(built(Several), plan=EAGER, saved=tmp_path)
    second.forward(batch).loss.backward()
    assert second.step.stats.traces == 0
    pairs = zip(first.model.parameters(), second.model.parameters(), strict=True)
    assert all(torch.equal(one.grad, two.grad) for one, two in pairs)


def renamed() -> Net:
    model = net()
    model.options.inner.rate = 2.0
    return model


def hooked() -> Net:
    model = net()
    model.body.register_forward_hook(lambda module, given, output: output * 2)
    return model


STALE: list[tuple[str, Callable[[], nn.Module], Any, gc.Plan, str]] = [
    ("attribute", lambda: net(scale=3.0), loss_fn, EAGER, r"attribute 'scale': was float '2.0', is float '3.0'"),
    ("function", lambda: net(act=torch.sin), loss_fn, EAGER, r"attribute 'act': was .*tanh, is .*sin"),
    ("nested", renamed, loss_fn, EAGER, r"attribute 'options': was "),
    ("width", lambda: net(width=9), loss_fn, EAGER, r"'body.0.weight'.*\(8, 3\).*\(9, 3\)"),
    ("dtype", lambda: net().double(), loss_fn, EAGER, r"torch.float32.*torch.float64"),
    ("hook", hooked, loss_fn, EAGER, r"hooks '.*' of 'body': was nothing"),
    ("loss", net, other_loss, EAGER, r"function 'other_loss': was nothing|function 'loss_fn': was "),
    ("plan", net, loss_fn, replace(EAGER, schedule="gpipe"), r"Plan\(schedule=...\) was '1f1b', is 'gpipe'"),
    ("dtype of sums", net, loss_fn, replace(EAGER, accumulate_dtype=torch.float64), r"accumulate_dtype=...\) was None"),
]


@pytest.mark.parametrize(("make", "loss", "plan", "says"), [c[1:] for c in STALE])
def test_what_differs_is_refused_by_name(
    make: Any, loss: Any, plan: gc.Plan, says: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.getbasetemp() / "stale"
    if not folder.exists():
        saved(folder, net())
    with pytest.raises(ArtifactError, match=says):
        gc.load(folder, make(), loss, plan=plan)


def test_versions_and_threads_are_in_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path, net())
    monkeypatch.setattr(stored, "_own_source", lambda: "another")
    with pytest.raises(ArtifactError, match=r"got: graphcomp was [0-9a-f]{16}, is another\n"):
        gc.load(tmp_path, net(), loss_fn, plan=EAGER)
    # What no program depends on may change.
    monkeypatch.undo()
    key = stored.key_of(EAGER, torch.device("cpu"), 0, net())
    assert key == stored.key_of(replace(EAGER, deadline=5.0, quiet=False), torch.device("cpu"), 0, net())
    assert key["threads"] == str(torch.get_num_threads()) and key["mesh"] == "none"
    assert key["float32 products"] == torch.get_float32_matmul_precision()
    assert any("Inductor" in name for name in stored.key_of(gc.Plan(), torch.device("cpu"), 0, net()))


@pytest.mark.parametrize(
    ("option", "value", "code_depends"),
    [
        ("max_autotune", True, True),
        ("max_autotune", False, False),  # as it is
        ("_micro_pipeline_tp", True, True),
        ("debug_index_asserts", True, True),
        ("compile_threads", 7, False),
        ("trace.enabled", True, False),
    ],
)
def test_options_of_inductor_are_in_the_key_as_far_as_code_depends_on_them(
    option: str, value: object, code_depends: bool
) -> None:
    before, after = (
        stored.key_of(gc.Plan(compile_options=given), torch.device("cpu"), 0, net()) for given in ({}, {option: value})
    )
    changed = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    assert changed == [f"option '{option}' of Inductor"] * code_depends


def test_missing_and_damaged_files(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="there are no saved programs"):
        gc.load(tmp_path, net(), loss_fn, plan=EAGER)
    with pytest.raises(StepError, match="nothing is compiled yet"):
        gc.compile_train_step(net(), loss_fn, plan=EAGER).save(tmp_path)
    saved(tmp_path, net())
    file = tmp_path / "rank_0.programs"
    file.write_bytes(file.read_bytes()[:500])
    with pytest.raises(ArtifactError, match="the saved programs cannot be read"):
        gc.load(tmp_path, net(), loss_fn, plan=EAGER)


def test_the_text_of_a_state_is_the_same_for_equal_models() -> None:
    for name in ("gpt", "moe", "dropout"):
        case = ZOO[name]
        one, two = (spelled(ModelGuard(case.build(), case.loss_fn).key()) for _ in range(2))
        assert one == two
        assert not any(" at 0x" in text for text in one.values())


@pytest.mark.inductor
def test_compiled_code_is_not_compiled_again(tmp_path: Path) -> None:
    plan = gc.Plan(quiet=True)
    found = saved(tmp_path, net(), plan)
    step = gc.load(tmp_path, net(), loss_fn, plan=plan)
    same(found, trained(step, 4, 6))
    assert (step.stats.traces, step.stats.programs) == (0, 0)
