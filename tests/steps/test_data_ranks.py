"""Data ranks, virtually: losses, metrics and all gradients equal eager PyTorch over the microbatches of all of them."""

from __future__ import annotations

import functools
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from expecttest import TestCase
from torch import nn

import graphcomp as gc
from graphcomp.errors import AgreementError, BatchError, PlanError, StepError
from graphcomp.testing import VirtualStep, run_virtual
from tests.wide import diagonal
from tests.zoo import ZOO
from tests.zoo.reference import Reference, reference

NAMES = [name for name in ZOO if name != "batch_norm"]
LAYOUTS = [("replicate", 1), ("replicate", 3), ("shard", 1), ("shard", 2), ("regather", 2)]
SPLITS = ((3, 1), (1, 2, 1))  # microbatches of each data rank


@functools.cache
def built(name: str) -> nn.Module:
    return ZOO[name].build(0).to(torch.float64)


def lines(name: str, counts: tuple[int, ...]) -> list[list[Any]]:
    """The microbatches of every data rank: the same sequence of microbatches, whatever the counts."""
    left = iter(ZOO[name].microbatches(sum(counts), 3, torch.float64))
    return [[next(left) for _ in range(count)] for count in counts]


@functools.cache
def eager(name: str, number: int) -> Reference:
    return reference(built(name), ZOO[name].loss_fn, ZOO[name].microbatches(number, 3, torch.float64))


def equal(found: torch.Tensor | None, expected: torch.Tensor | None, name: str) -> None:
    assert (found is None) == (expected is None), name
    if found is not None and expected is not None:
        torch.testing.assert_close(
            found.double(), expected.double(), rtol=1e-9, atol=1e-12, msg=lambda m: f"{name}: {m}"
        )


@pytest.mark.parametrize(("name", "layout"), diagonal(NAMES, LAYOUTS, step=2), ids=str)
def test_every_model_equals_eager_over_all_data_ranks(name: str, layout: tuple[str, int]) -> None:
    case, model, (parameters, stages) = ZOO[name], built(name), layout
    plan = gc.Plan(stages=stages, backend="eager", quiet=True, bucket_bytes=4096)
    if parameters != "replicate":
        plan = replace(plan, parameters="shard", regather=parameters == "regather")
    splits = ((2, 2),) if parameters == "regather" else SPLITS
    for counts in splits:
        step = VirtualStep(model, case.loss_fn, plan=plan, data_ranks=len(counts))
        if case.random:  # eager draws otherwise; what has to be equal is every other layout
            torch.manual_seed(11)
            one_line = VirtualStep(
                model, case.loss_fn, plan=replace(plan, stages=2, parameters="replicate", regather=False)
            )
            one = one_line.run(case.microbatches(sum(counts), 3, torch.float64))
            expected_gradients, expected_loss = dict(one.gradients), one.result.loss
        else:
            expected_gradients, expected_loss = eager(name, sum(counts)).gradients, eager(name, sum(counts)).loss
        torch.manual_seed(11)
        ran = step.run(lines(name, counts))
        equal(ran.result.loss, expected_loss, "loss")
        trainable = [key for key, parameter in model.named_parameters() if parameter.requires_grad]
        for key in trainable:
            equal(ran.gradients.get(key), expected_gradients.get(key), key)
        if not case.random:
            expected = eager(name, sum(counts))
            for key, value in expected.losses.items():
                equal(ran.result.losses[key], value, key)
            for key, count in expected.tokens.items():
                assert float(ran.result.tokens[key]) == count
            for key, value in expected.metrics.items():
                if key.startswith("last"):  # of the first data rank's microbatches
                    value = eager(name, counts[0]).metrics[key]
                equal(ran.result.metrics[key], value, key)
            assert len(ran.result.microbatch_losses) == sum(counts)
            for found, share in zip(ran.result.microbatch_losses, expected.microbatch_losses, strict=True):
                equal(found, share, "share")


class Weight(nn.Module):
    """One weight, loss w * x of each valid token."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w * x


def weighted(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> gc.TokenLoss:
    valid = batch["labels"] != -100
    return gc.TokenLoss((output * valid).sum(), valid.sum())


def row(*values: float) -> dict[str, torch.Tensor]:
    x, labels = torch.zeros(6), torch.full((6,), -100)
    x[: len(values)], labels[: len(values)] = torch.tensor(values), 1
    return {"x": x, "labels": labels}


UNEQUAL = [[row(1, 1, 1, 1), row(9)], [row(2, 2), row(5)]]


@pytest.mark.parametrize("parameters", ["replicate", "shard"])
def test_very_unequal_token_counts(parameters: Any) -> None:
    plan = gc.Plan(backend="eager", parameters=parameters, quiet=True)
    result, gradients = run_virtual(Weight(), weighted, UNEQUAL, plan=plan, data_ranks=2)
    assert gradients["w"].tolist() == [2.75]
    assert result.tokens["loss"].item() == 8
    assert result.loss.item() == 2.75
    assert [share.item() for share in result.microbatch_losses] == [4 / 8, 9 / 8, 4 / 8, 5 / 8]


@pytest.mark.parametrize("parameters", ["replicate", "shard"])
def test_no_tokens_on_a_rank_and_none_at_all(parameters: Any) -> None:
    plan = gc.Plan(backend="eager", parameters=parameters, quiet=True)
    step = VirtualStep(Weight(), weighted, plan=plan, data_ranks=2)
    ran = step.run([[row(1, 1), row()], [row(), row()]])
    assert (ran.result.loss.item(), ran.gradients["w"].tolist(), ran.result.tokens["loss"].item()) == (1.0, [1.0], 2)
    some = ran.collectives
    ran = step.run([[row(), row()], [row(), row()]])
    assert (ran.result.loss.item(), ran.gradients["w"].tolist(), ran.result.tokens["loss"].item()) == (0.0, [0.0], 0)
    assert ran.collectives == some


class Branches(nn.Module):
    """Which part runs is decided by the batch's own fields."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(3, 3, dtype=torch.float64) for _ in range(3))

    def forward(self, x: torch.Tensor, which: str) -> torch.Tensor:
        return self.a(x) if which == "a" else self.b(self.a(x))


def named(output: torch.Tensor, batch: dict[str, Any]) -> dict[str, Any]:
    losses: dict[str, Any] = {"main": gc.TokenLoss(output.square().sum(), output.shape[0])}
    if batch["which"] == "b":
        losses["extra"] = gc.TokenLoss(output.abs().sum(), torch.full((), 0.5, dtype=torch.float64))
    return losses


@pytest.mark.parametrize("parameters", ["replicate", "shard"])
@pytest.mark.parametrize("order", [("a", "b"), ("b", "a")])
def test_a_loss_and_a_parameter_that_only_one_data_rank_has(order: tuple[str, str], parameters: Any) -> None:
    model = Branches()
    batches = [{"x": torch.randn(4 + i, 3, dtype=torch.float64), "which": which} for i, which in enumerate(order)]
    plan = gc.Plan(backend="eager", parameters=parameters, quiet=True)
    step = VirtualStep(model, named, plan=plan, data_ranks=2)
    ran = step.run([[batch] for batch in batches])
    expected = reference(model, named, batches)
    equal(ran.result.loss, expected.loss, "loss")
    assert set(ran.result.losses) == {"main", "extra"}
    assert ran.result.tokens["extra"].item() == 0.5
    for name, gradient in expected.gradients.items():
        equal(ran.gradients.get(name), gradient, name)
    assert ran.gradients.get("c.weight") is None
    # A step in which nobody has it: no gradient, as in eager, though programs for it are known.
    ran = step.run([[{"x": torch.ones(2, 3, dtype=torch.float64), "which": "a"}]] * 2)
    assert ran.gradients.get("b.weight") is None
    assert set(ran.result.losses) == {"main"}


def test_shared_counts_make_two_calls_one_step() -> None:
    step = VirtualStep(Weight(), weighted, plan=gc.Plan(backend="eager", quiet=True), data_ranks=2)
    halves = [[[line[i]] for line in UNEQUAL] for i in range(2)]
    found = [step.run(half, tokens={"loss": torch.tensor(8)}) for half in halves]
    assert sum(ran.gradients["w"].item() for ran in found) == 2.75
    assert sum(ran.result.loss.item() for ran in found) == 2.75
    assert [ran.result.tokens["loss"].item() for ran in found] == [8, 8]


def test_shared_counts_have_the_form_of_the_loss_s_own() -> None:
    """A compiled program takes its denominator in one form; half a token is not rounded in silence."""
    step = VirtualStep(Weight(), weighted, plan=gc.Plan(backend="eager", quiet=True), data_ranks=2)
    with pytest.raises(StepError, match=r"the tokens of loss 'loss' are counted in whole numbers(.|\n)*\.long\(\)"):
        step.run(UNEQUAL, tokens={"loss": torch.tensor(8.0)})
    assert step.run(UNEQUAL, tokens={"loss": torch.tensor(8)}).gradients["w"].item() == 2.75


def test_a_loss_scale_scales_gradients_alone() -> None:
    step = VirtualStep(Weight(), weighted, plan=gc.Plan(backend="eager", quiet=True), data_ranks=2)
    ran = step.run(UNEQUAL, loss_scale=1024.0)
    assert (ran.result.loss.item(), ran.gradients["w"].item()) == (2.75, 2.75 * 1024)


def instructions(plan: gc.Plan, counts: tuple[int, ...]) -> str:
    step = VirtualStep(built("tied_gpt"), ZOO["tied_gpt"].loss_fn, plan=plan, data_ranks=len(counts))
    bound = step.bind(lines("tied_gpt", counts))
    program = bound.lines[0].prepared.programs.ranks[0]
    texts = [re.sub(r"\(.*\)|[%_][\w%, ]* = |( g.*)? = %\d+", "", str(one)) for one in program.instructions]
    return "\n".join(text.split(" free")[0].strip() for text in texts if not text.startswith("free"))


class TestText(TestCase):
    def test_gathered_once_a_step(self) -> None:
        plan = gc.Plan(stages=2, backend="eager", parameters="shard", quiet=True)
        self.assertExpectedInline(
            instructions(plan, (1, 2)),
            """\
unshard stage 0
post 1>0 of microbatch 0
run 0F0
send 0>1 of microbatch 0
wait 1>0 of microbatch 0
finish send 0>1 of microbatch 0
begin g0-g13
run 0B0 adding to g0-g13
post 1>0
wait 1>0
add g0 += %48
reduce stage 0
send 0>1
finish sends""",
        )

    def test_gathered_for_every_action(self) -> None:
        plan = gc.Plan(stages=2, backend="eager", parameters="shard", regather=True, quiet=True)
        self.assertExpectedInline(
            instructions(plan, (1, 1)),
            """\
post 1>0 of microbatch 0
unshard stage 0
run 0F0
send 0>1 of microbatch 0
wait 1>0 of microbatch 0
finish send 0>1 of microbatch 0
unshard stage 0
begin g0-g13
run 0B0 adding to g0-g13
post 1>0
wait 1>0
add g0 += %62
reduce stage 0
send 0>1
finish sends""",
        )


@pytest.mark.parametrize("parameters", ["replicate", "shard"])
def test_a_stage_reduces_while_those_before_it_still_run(parameters: str) -> None:
    """The last gradient of an activation is on its way, and nothing is left to run, when the reduction begins."""
    plan = gc.Plan(stages=3, backend="eager", parameters=parameters, quiet=True)  # type: ignore[arg-type]
    step = VirtualStep(built("gpt"), ZOO["gpt"].loss_fn, plan=plan, data_ranks=2)
    for program in step.bind(lines("gpt", (3, 3))).lines[0].prepared.programs.ranks:
        kinds = [type(one).__name__ for one in program.instructions]
        end = kinds.index("Reduce")
        assert kinds.count("Reduce") == 1 and not {"Run", "Send", "WaitReceive"} & set(kinds[end:])
        assert "FinishSends" in kinds[end:]
        assert kinds[:end].count("Send") == (3 if program.rank in (0, 2) else 6)


def test_what_cannot_be() -> None:
    with pytest.raises(PlanError, match="shards none"):
        gc.Plan(regather=True)
    plan = gc.Plan(backend="eager", parameters="shard", regather=True, quiet=True)
    with pytest.raises(AgreementError, match="as many microbatches on every data rank"):
        run_virtual(Weight(), weighted, [UNEQUAL[0], UNEQUAL[1][:1]], plan=plan, data_ranks=2)
    with pytest.raises(BatchError, match="every data rank needs a list"):
        run_virtual(Weight(), weighted, UNEQUAL[:1], data_ranks=2)
