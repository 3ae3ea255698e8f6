"""The step as the trainer sees it, in one process: what it takes, what it returns, what it leaves in the model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import register_dataclass
from transformers.modeling_outputs import CausalLMOutput

import graphcomp as gc
from graphcomp.errors import BatchError, PlanError, StepError
from graphcomp.runtime.results.result import StepResult
from tests.zoo import ZOO
from tests.zoo.case import Case
from tests.zoo.reference import Reference, reference

EAGER = gc.Plan(backend="eager", quiet=True)


def compiled(name: str) -> tuple[Case, nn.Module, gc.step.CompiledStep]:
    case = ZOO[name]
    model = case.build()
    return case, model, gc.compile_train_step(model, case.loss_fn, plan=EAGER)


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


def same(one: Tensor | None, two: Tensor | None) -> bool:
    return one is two or (one is not None and two is not None and torch.equal(one, two))


def equals(result: StepResult, model: nn.Module, expected: Reference) -> None:
    """Gradients and buffers bitwise; the reported numbers are added up in double precision."""
    assert result.loss.item() == pytest.approx(expected.loss.item(), rel=1e-6)
    found = gradients(model)
    assert found.keys() == expected.gradients.keys()
    assert all(same(found[name], gradient) for name, gradient in expected.gradients.items())
    assert all(torch.equal(buffer, expected.buffers[name]) for name, buffer in model.named_buffers())


def test_everything_a_step_reports() -> None:
    case, model, step = compiled("moe")
    batches = case.microbatches(3)
    expected = reference(model, case.loss_fn, batches)
    result = step(batches)
    equals(result, model, expected)
    assert list(result.losses) == list(expected.losses) == ["lm", "balance"]
    assert {name: int(count) for name, count in result.tokens.items()} == {"lm": expected.tokens["lm"], "balance": 3}
    for name, value in {**expected.losses, **expected.metrics}.items():
        assert {**result.losses, **result.metrics}[name].item() == pytest.approx(value.item(), rel=1e-6), name
    shares = [share.item() for share in result.microbatch_losses]
    assert shares == pytest.approx([share.item() for share in expected.microbatch_losses], rel=1e-6)
    assert len(set(shares)) == 3 and sum(shares) == pytest.approx(result.loss.item())
    reported = [result.loss, *result.losses.values(), *result.metrics.values(), *result.microbatch_losses]
    assert all(value.dim() == 0 and not value.requires_grad for value in reported)
    assert result.outputs is None
    assert (step.stats.traces, step.stats.steps, step.stats.messages, step.stats.collectives) == (1, 1, 0, 0)


def test_an_unnamed_loss_is_called_loss() -> None:
    _, _, step = compiled("gpt")
    result = step(ZOO["gpt"].microbatches(2))
    assert list(result.losses) == list(result.tokens) == ["loss"] and result.metrics == {}
    assert result.loss.item() == result.losses["loss"].item()


@dataclass
class Out:
    y: Tensor
    note: str
    parts: dict[str, Tensor | None]


register_dataclass(Out, field_names=[each.name for each in fields(Out)])


class Typed(nn.Module):
    """One linear layer that returns its result in some type."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.layer = kind, nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Any:
        y = self.layer(x)
        match self.kind:
            case "tensor":
                return y
            case "tuple":
                return y, 5, None
            case "dict":
                return {"y": y, "fixed": 7, "inner": [y.sum()]}
            case "dataclass":
                return Out(y, "kept", {"sum": y.sum(), "none": None})
        return CausalLMOutput(loss=y.square().mean(), logits=y)


def first(output: Any) -> Tensor:
    match output:
        case Tensor():
            return output
        case (y, *_):
            return y
        case CausalLMOutput():
            return output.logits
        case dict():
            return output["y"]
    return output.y


@pytest.mark.parametrize("kind", ["tensor", "tuple", "dict", "dataclass", "hf"])
def test_outputs_come_in_the_models_own_type(kind: str) -> None:
    model = Typed(kind)
    step = gc.compile_train_step(model, lambda output, batch: first(output).square().mean(), plan=EAGER)
    batches = [torch.randn(2, 3), torch.randn(4, 3)]
    assert step(batches).outputs is None
    for outputs in ("local", "all"):
        found = step(batches, outputs=outputs).outputs
        assert found is not None and len(found) == 2
        for one, batch in zip(found, batches, strict=True):
            expected = model(batch)
            assert type(one) is type(expected)
            assert torch.equal(first(one), first(expected))
            if kind == "tuple":
                assert one[1:] == (5, None)
            if kind == "dict":
                assert one["fixed"] == 7 and torch.equal(one["inner"][0], expected["inner"][0])
            if kind == "dataclass":
                assert one.note == "kept" and one.parts["none"] is None and torch.equal(one.parts["sum"], one.y.sum())
            if kind == "hf":
                assert list(one) == ["loss", "logits"] and torch.equal(one.loss, expected.loss)


class Moving(nn.Module):
    """Returns a buffer as it was, and part of it, before forward replaces it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("mean", torch.zeros(2))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        before = self.mean
        self.mean = before + x.mean(0)
        return {"y": self.layer(x), "before": before, "part": before[1:]}


@pytest.mark.parametrize("count", [1, 2])
def test_an_output_that_was_a_buffer_stays_as_it_was(count: int) -> None:
    batches = [torch.full((rows, 2), float(rows)) for rows in (3, 5)[:count]]
    expected, eager = [], Moving()
    for x in batches:
        expected.append(eager(x))
    model = Moving()
    step = gc.compile_train_step(model, lambda output, _: output["y"].sum(), plan=EAGER)
    result = step(batches, outputs="local")
    assert result.outputs is not None
    for found, wanted in zip(result.outputs, expected, strict=True):
        assert torch.equal(found["before"], wanted["before"]) and torch.equal(found["part"], wanted["part"])
    assert torch.equal(model.mean, eager.mean)


def test_a_model_with_its_own_loss_needs_no_loss_function() -> None:
    model = Typed("hf")
    step = gc.compile_train_step(model, plan=EAGER)
    batches = [torch.randn(2, 3), torch.randn(4, 3)]
    equals(step(batches), model, reference(model, None, batches))


def test_unknown_outputs() -> None:
    case, model, step = compiled("mlp")
    with pytest.raises(PlanError, match=r"unknown outputs='full'\n  expected: 'none', 'local', 'all'"):
        step(case.microbatches(1), outputs="full")  # type: ignore[arg-type]
    assert step.stats.traces == 0 and all(grad is None for grad in gradients(model).values())


@pytest.mark.parametrize("name", ["batch_norm", "dropout"])
def test_evaluation_equals_eager_and_changes_nothing(name: str) -> None:
    case, model, step = compiled(name)
    batches = case.microbatches(3)
    step(batches)
    list(model.modules())[1].eval()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    kept = {key: (grad, grad.clone()) for key, grad in gradients(model).items() if grad is not None}
    modes, random = [module.training for module in model.modules()], torch.get_rng_state()
    result = step.evaluate(batches, outputs="all")
    assert modes == [module.training for module in model.modules()]
    assert torch.equal(random, torch.get_rng_state())
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert all(dict(model.named_parameters())[key].grad is grad for key, (grad, _) in kept.items())
    assert all(torch.equal(grad, copy) for grad, copy in kept.values())
    expected = reference(model.eval(), case.loss_fn, batches, backward=False)
    assert result.loss.item() == pytest.approx(expected.loss.item(), rel=1e-6)
    assert all(torch.equal(one, two) for one, two in zip(result.outputs or (), expected.outputs, strict=True))
    with torch.no_grad():
        assert step.evaluate(batches).loss.item() == result.loss.item()


def test_evaluation_in_between_changes_no_later_number() -> None:
    def losses(with_evaluation: bool) -> list[float]:
        case, model, step = compiled("dropout")
        optimizer, found = torch.optim.SGD(model.parameters(), 0.1), []
        torch.manual_seed(3)
        for number in range(3):
            found.append(step(case.microbatches(2, number)).loss.item())
            optimizer.step()
            optimizer.zero_grad()
            if with_evaluation:
                step.evaluate(case.microbatches(3, 9))
        assert step.stats.traces == 1 + with_evaluation
        return found

    assert losses(True) == losses(False)


def test_the_loss_scale_scales_gradients_exactly_and_not_the_loss() -> None:
    case, model, step = compiled("tied_gpt")
    batches = case.microbatches(2)
    plain = step(batches)
    kept = gradients(model)
    model.zero_grad()
    scaled = step(batches, loss_scale=1024.0)
    assert scaled.loss.item() == plain.loss.item()
    for name, gradient in gradients(model).items():
        assert gradient is not None and torch.equal(gradient, kept[name] * 1024), name
    assert step.stats.traces == 1


def test_gradients_accumulate_over_calls_and_onto_what_is_there() -> None:
    case, model, step = compiled("gpt")
    first_batches, second_batches = case.microbatches(2, 1), case.microbatches(3, 2)
    one = reference(model, case.loss_fn, first_batches).gradients
    two = reference(model, case.loss_fn, second_batches).gradients
    there = torch.randn_like(model.get_parameter("head.weight"))
    model.get_parameter("head.weight").grad = there.clone()
    step(first_batches)
    step(second_batches)
    for name, gradient in gradients(model).items():
        start = there if name == "head.weight" else torch.zeros_like(one[name])
        assert gradient is not None and torch.equal(gradient, start + one[name] + two[name]), name
    model.zero_grad(set_to_none=False)
    step(first_batches)
    assert all(torch.equal(gradient, one[name]) for name, gradient in gradients(model).items())
    model.zero_grad(set_to_none=True)
    step(second_batches)
    assert all(torch.equal(gradient, two[name]) for name, gradient in gradients(model).items())


def test_parameters_are_the_users_own_objects() -> None:
    _, model, step = compiled("half_frozen")
    for _ in range(2):
        named = dict(step.named_parameters())
        assert list(named) == [name for name, _ in model.named_parameters()]
        assert all(named[name] is parameter for name, parameter in model.named_parameters())
        assert [id(p) for p in step.parameters()] == [id(p) for p in model.parameters()]
        step(ZOO["half_frozen"].microbatches(1))


def test_an_optimizer_may_be_made_before_or_after_compiling() -> None:
    def trajectory(early: bool) -> dict[str, Tensor]:
        case = ZOO["tied_gpt"]
        model = case.build()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2) if early else None
        step = gc.compile_train_step(model, case.loss_fn, plan=EAGER)
        step.compile(case.microbatches(1)[0])
        assert all(grad is None for grad in gradients(model).values())
        optimizer = optimizer or torch.optim.AdamW(step.parameters(), 1e-2)
        for number in range(3):
            step(case.microbatches(2, number))
            optimizer.step()
            optimizer.zero_grad()
        assert step.stats.traces == 1
        return model.state_dict()

    early, late = trajectory(True), trajectory(False)
    assert all(torch.equal(early[name], late[name]) for name in early)


@pytest.mark.parametrize("name", ["gpt", "ragged_gpt"])
def test_any_number_of_microbatches_without_another_compile(name: str) -> None:
    case, model, step = compiled(name)
    programs = None
    for number in (3, 5, 1):
        model.zero_grad()
        batches = case.microbatches(number, number)
        equals(step(iter(batches)), model, reference(model, case.loss_fn, batches))
        assert step.stats.traces == 1
        assert step.stats.programs == (programs or step.stats.programs)
        programs = step.stats.programs


def generator(batches: list[Any]) -> Iterator[Any]:
    yield from batches


def test_an_iterator_is_read_into_a_list() -> None:
    case, model, step = compiled("mlp")
    batches = case.microbatches(4)
    equals(step(generator(batches)), model, reference(model, case.loss_fn, batches))


@pytest.mark.parametrize(
    ("given", "name"),
    [({"x": torch.ones(2, 3)}, "dict"), (torch.ones(2, 3), "Tensor"), ((torch.ones(2, 3),), "tuple"), (3, "int")],
)
def test_a_single_batch_is_refused(given: Any, name: str) -> None:
    step = gc.compile_train_step(nn.Linear(3, 1), lambda output, _: output.mean(), plan=EAGER)
    for call in (step, step.evaluate):
        with pytest.raises(BatchError) as caught:
            call(given)
        assert str(caught.value) == (
            f"a step takes a list of microbatches, not one batch\n  got: {name}\n"
            "  what to do: put the batch into a list: step([batch])\n  (see docs/errors.md#batcherror)"
        )
    with pytest.raises(
        BatchError, match=r"a step was given no microbatch\n  expected: a list of at least one\n  got: \[\]"
    ):
        step([])


def test_a_training_step_under_no_grad_is_refused() -> None:
    case, _, step = compiled("mlp")
    with (
        torch.no_grad(),
        pytest.raises(StepError, match=r"a training step was called under no_grad\n  what to do: call"),
    ):
        step(case.microbatches(1))


def test_before_the_first_step_there_is_nothing_to_show() -> None:
    case, _, step = compiled("mlp")
    with pytest.raises(StepError, match="nothing is compiled yet\n  what to do: run a step, or call"):
        step.explain()
    step.compile(case.microbatches(1)[0])
    assert step.explain().startswith("plan: 1 stage")
