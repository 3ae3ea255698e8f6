"""Data ranks that disagree, or of which one fails before the step: all say what it is, and go on together."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import graphcomp as gc
from graphcomp.testing import run_ranks
from tests.sharing import shared_captures
from tests.steps.test_data_processes import full, mesh_of, numbers, plan_of
from tests.zoo import ZOO
from tests.zoo.case import VOCAB
from tests.zoo.reference import reference

WIDTH = 32


def refused(call: Callable[..., Any], *given: Any, **options: Any) -> str:
    with pytest.raises(Exception) as caught:
        call(*given, **options)
    return f"{type(caught.value).__name__}: {caught.value}"


def fails_here(logits: Tensor, batch: dict[str, Any]) -> gc.TokenLoss:
    if batch["fail"] == dist.get_rank():
        raise KeyError("only here")
    return gc.token_loss(logits, batch["labels"])


class Block(nn.Module):
    """Without attention: many kinds of models are captured here, on four processes each."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.mlp = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm1(x)).tanh()


class Reversed(nn.Module):
    """The same parameters under the same names; the blocks may run the other way round, or be scaled."""

    def __init__(self, order: int = 1, scale: float = 1.0, blocks: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.order, self.scale = order, scale

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in list(self.blocks)[:: self.order]:
            x = block(x) * (self.scale if self.training else 1.0)
        return self.head(self.norm(x))


def small() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Reversed().double()


def plans(mesh: DeviceMesh, odd: bool) -> dict[str, str]:
    """One rank has another plan."""
    found = {}
    for option, values in {
        "schedule": ("1f1b", "gpipe"),
        "bucket_bytes": (30_000, 40_000),
        "max_programs": (8, 9),
        "accumulate_dtype": (None, torch.float64),
    }.items():
        plan = plan_of(mesh, "replicate", **{option: values[odd]})
        found[option] = refused(gc.compile_train_step, nn.Linear(2, 2), plan=plan)
    modes = ("replicate", "shard"), ("shard", "regather")
    for pair in modes:
        found[pair[1]] = refused(gc.compile_train_step, nn.Linear(2, 2), plan=plan_of(mesh, pair[odd]))
    return found


def models(mesh: DeviceMesh, mode: str, odd: bool) -> dict[str, str]:
    """One data rank has another model."""
    case, found = ZOO["gpt"], {}
    batches = case.microbatches(2)
    kinds = {
        "order": lambda: Reversed(order=-1 if odd else 1),
        "attribute": lambda: Reversed(scale=2.0 if odd else 1.0),
        "deeper": lambda: Reversed(blocks=3 if odd else 2),
        "frozen": lambda: freeze(Reversed(), odd),
        "evaluated": lambda: Reversed(scale=2.0).train(not odd),
    }
    for kind, build in kinds.items():
        model = build()
        before = [(p, p.detach().clone()) for p in model.parameters()]
        step = gc.compile_train_step(model, case.loss_fn, plan=plan_of(mesh, mode))
        found[kind] = refused(step, batches)
        untouched = all(type(p) is nn.Parameter and p.grad is None and torch.equal(p, value) for p, value in before)
        found[kind] += f"\nuntouched: {untouched}"
    return found


def freeze(model: nn.Module, frozen: bool) -> nn.Module:
    model.head.requires_grad_(not frozen)
    return model


def steps(mesh: DeviceMesh, mode: str) -> dict[str, Any]:
    """Each disagreement and failure in turn; the same step goes on after each."""
    case, found = ZOO["gpt"], {}
    rank, data_rank = dist.get_rank(), mesh["dp"].get_local_rank()
    model = small()
    before = {key: p.detach().clone() for key, p in model.named_parameters()}
    step = gc.compile_train_step(model, fails_here, plan=plan_of(mesh, mode))
    good = [{**batch, "fail": -1} for batch in case.microbatches(4, 0, torch.float64)]
    mine = good[2 * data_rank : 2 * data_rank + 2]
    failing = 3
    found["tracing"] = refused(step, [{**batch, "fail": failing} for batch in mine])
    found["single"] = refused(step, mine if rank != failing else mine[0])
    found["mode"] = refused(step.evaluate if rank == failing else step, mine)
    if mode == "shard":
        held = weakref.ref(model.head.weight) if rank == failing else None
        found["sharding"] = refused(step, mine)
        del held
    found["untouched"] = all(
        type(p) is nn.Parameter and p.grad is None and torch.equal(p, before[key])
        for key, p in model.named_parameters()
    )
    found["first"] = numbers(step(mine))
    kept = {key: full(p.grad) for key, p in step.named_parameters() if p.grad is not None}
    found["scale"] = refused(step, mine, loss_scale=2.0 if data_rank else 1.0)
    found["outputs"] = refused(step, mine, outputs="all" if rank == failing else "none")
    found["mode again"] = refused(step if data_rank else step.evaluate, mine)
    found["tokens"] = refused(step, mine, tokens={"loss": 5} if data_rank else None)
    found["unknown"] = refused(step, mine, tokens={"lost": 5})
    if rank == failing:
        model.head.weight.requires_grad_(False)
    found["frozen"] = refused(step, mine)
    model.head.weight.requires_grad_(True)
    found["tracing again"] = refused(step, [{**batch, "fail": failing if data_rank else -1} for batch in mine])
    if mode == "regather":
        found["counts"] = refused(step, mine[: 1 + data_rank])
    now = {key: full(p.grad) for key, p in step.named_parameters() if p.grad is not None}
    found["kept"] = now.keys() == kept.keys() and all(torch.equal(now[key], kept[key]) for key in kept)
    model.zero_grad()
    found["again"] = numbers(step(mine))
    found["gradients"] = {key: full(p.grad) for key, p in step.named_parameters() if p.grad is not None}
    found["stats"] = step.stats.steps
    return found


def on_rank(rank: int, layout: str) -> dict[str, Any]:
    mesh = mesh_of(layout)
    odd = rank == dist.get_world_size() - 1
    with shared_captures():
        found: dict[str, Any] = {mode: steps(mesh, mode) for mode in ("replicate", "shard", "regather")}
        for mode in ("replicate", "shard"):
            found[f"models {mode}"] = models(mesh, mode, mesh["dp"].get_local_rank() == 1)
    found["plans"] = plans(mesh, odd)
    return found


@functools.cache
def ranks() -> list[dict[str, Any]]:
    return run_ranks(on_rank, 4, "pp2 x dp2", timeout=280)


def both(text: str) -> tuple[str, str]:
    """What an AgreementError says that the ranks would do."""
    assert text.startswith("AgreementError: the ranks would not do the same\n"), text
    mine, theirs = text.split("expected: ")[1].split("\n  got: ")
    return mine, theirs.splitlines()[0]


def shows(text: str, one: str, other: str) -> bool:
    """In either order: each rank sees its own side first."""
    mine, theirs = both(text)
    return (one in mine and other in theirs) or (other in mine and one in theirs)


@pytest.mark.gloo
def test_other_plans_are_refused_when_the_step_is_made() -> None:
    for found in ranks():
        plans = found["plans"]
        assert shows(plans["schedule"], "schedule='1f1b' (rank 0)", "schedule='gpipe' (rank 3)")
        assert shows(plans["bucket_bytes"], "bucket_bytes=30000", "bucket_bytes=40000")
        assert shows(plans["max_programs"], "max_programs=8", "max_programs=9")
        assert shows(plans["accumulate_dtype"], "accumulate_dtype=None", "accumulate_dtype=torch.float64")
        assert shows(plans["shard"], "parameters='replicate'", "parameters='shard'")
        assert shows(plans["regather"], "regather=False", "regather=True")


@pytest.mark.gloo
@pytest.mark.parametrize("mode", ["replicate", "shard"])
def test_other_models_are_refused_before_anything_is_changed(mode: str) -> None:
    for found in ranks():
        models = found[f"models {mode}"]
        assert all(text.endswith("untouched: True") for text in models.values())
        assert shows(models["order"], "blocks.0", "blocks.1")
        assert shows(models["attribute"], "native_layer_norm", ", 2.0)  # (root)  test_data_failures.py")
        assert shows(models["deeper"], "parameter 'norm.weight' (32,)", "parameter 'blocks.2.norm1.weight' (32,)")
        assert shows(models["evaluated"], "training mode of the model: True", "training mode of the model: False")
        assert shows(models["frozen"], "(64, 32) torch.float32, requires_grad=True", "requires_grad=False")


@pytest.mark.gloo
@pytest.mark.parametrize("mode", ["replicate", "shard", "regather"])
def test_what_goes_wrong_before_a_step_goes_wrong_on_all_ranks(mode: str) -> None:
    for rank, each in enumerate(ranks()):
        found = each[mode]
        for key, error in {
            "tracing": "KeyError: 'only here'",
            "tracing again": "KeyError: 'only here'",
            "single": "BatchError: a step takes a list of microbatches",
            **({"sharding": "StateError: parameter 'head.weight' cannot be sharded"} if mode == "shard" else {}),
        }.items():
            assert error in found[key] and found[key].startswith("RankFailure: rank 3 could not") == (rank != 3), key
        assert shows(found["mode"], "a training step", "an evaluation step")
        assert shows(found["mode again"], "a training step", "an evaluation step")
        assert shows(found["scale"], "loss_scale=1.0", "loss_scale=2.0")
        assert shows(found["outputs"], "outputs='none'", "outputs='all'")
        assert shows(found["tokens"], "tokens {}", "tokens {'loss': 5}")
        assert found["unknown"].startswith("StepError: the step has no loss named 'lost'")
        assert shows(found["frozen"], "parameter 'head.weight' of 'head': ", "requires_grad=False")
        if mode == "regather":
            assert "as many microbatches on every data rank\n  got: 1 on data rank 0, 2 on" in found["counts"]


@pytest.mark.gloo
@pytest.mark.parametrize("mode", ["replicate", "shard", "regather"])
def test_nothing_is_changed_by_it_and_the_same_step_goes_on(mode: str) -> None:
    case = ZOO["gpt"]
    expected = reference(small(), case.loss_fn, case.microbatches(4, 0, torch.float64))
    for each in ranks():
        found = each[mode]
        assert found["untouched"] and found["kept"]
        assert found["first"] == found["again"] == ranks()[0][mode]["first"]
        assert found["first"]["loss"] == pytest.approx(float(expected.loss), rel=1e-9)
        assert found["stats"] == 2
        for key, gradient in found["gradients"].items():
            torch.testing.assert_close(gradient, expected.gradients[key], rtol=1e-9, atol=1e-12)
