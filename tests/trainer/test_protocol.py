"""prepare_batch, forward, backward, optimizer: one text, alone and compiled, and what backward promises."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphcomp as gc
from graphcomp.errors import PlanError, StepError
from graphcomp.testing import check_parity, run_virtual
from tests.trainer.speaking import Several, Speaker, Tokens, built, texts, train

EAGER = gc.Plan(backend="eager", quiet=True)


def by_name(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def close(one: dict[str, Any], two: dict[str, Any]) -> None:
    assert one.keys() == two.keys()
    for name, value in one.items():
        torch.testing.assert_close(value, two[name], rtol=1e-9, atol=1e-12, msg=lambda text, n=name: f"{n}: {text}")


def reference(model: nn.Module, batches: list[Tokens]) -> tuple[float, dict[str, Tensor | None]]:
    """Eager: the sum over all tokens, divided by how many there are."""
    model = copy.deepcopy(model)
    count = sum(int((batch.labels != -100).sum()) for batch in batches)
    total = 0.0
    for batch in batches:
        loss = model.forward(batch).loss.total / count
        loss.backward()
        total += loss.item()
    return total, by_name(model)


def test_the_same_four_lines_alone_and_compiled() -> None:
    data = [texts(3, seed) for seed in range(4)]
    alone, compiled = built(Speaker, "scalar"), built(Speaker, "scalar")
    expected = train(alone, alone.parameters(), data)
    model = gc.compile(compiled, plan=EAGER)
    assert train(model, model.parameters(), data) == pytest.approx(expected, rel=1e-12)
    close(dict(compiled.named_parameters()), dict(alone.named_parameters()))
    assert model.step.stats.traces == 1


@pytest.mark.parametrize("kind", [Speaker, Several])
def test_a_step_divides_by_its_tokens_whatever_its_microbatches(kind: Any) -> None:
    user = built(kind)
    model = gc.compile(user, plan=EAGER)
    batch = model.prepare_batch(texts(6))
    assert isinstance(batch, list) == (kind is Several)
    out = model.forward(batch)
    loss, expected = reference(user, batch if isinstance(batch, list) else [batch])
    assert by_name(user) == dict.fromkeys(expected)
    out.loss.backward()
    close(by_name(user), expected)
    assert out.loss.item() == pytest.approx(loss) and out.loss.shape == ()
    assert len(out.result.microbatch_losses) == (3 if kind is Several else 1)


@pytest.mark.parametrize(("stages", "data_ranks"), [(1, 1), (2, 1), (4, 1), (2, 2)])
def test_such_a_model_is_cut_like_any_other(stages: int, data_ranks: int) -> None:
    user = built(Speaker, "token", 4)
    lines = [[user.prepare_batch(texts(2, seed)), user.prepare_batch(texts(3, seed + 9))] for seed in range(data_ranks)]
    given: Any = lines if data_ranks > 1 else lines[0]
    plan = gc.Plan(stages=stages, backend="eager", quiet=True)
    result, gradients = run_virtual(user, None, given, plan=plan, data_ranks=data_ranks)
    loss, expected = reference(user, [batch for line in lines for batch in line])
    assert result.loss.item() == pytest.approx(loss)
    close(gradients, expected)
    check_parity(user, None, given, plan=plan, data_ranks=data_ranks)


def test_backward_deposits_what_the_loss_is_multiplied_by() -> None:
    user = built()
    model = gc.compile(user, plan=EAGER)
    batches = [model.prepare_batch(texts(2, seed)) for seed in range(2)]
    single = [reference(user, [batch])[1] for batch in batches]
    dropped = model.forward(batches[0])
    assert user.head.weight.grad is None
    del dropped
    (model.forward(batches[0]).loss * 4).backward()
    close(by_name(user), {name: 4 * value for name, value in single[0].items()})
    (model.forward(batches[1]).loss / 2).backward()
    close(by_name(user), {name: 4 * value + single[1][name] / 2 for name, value in single[0].items()})
    user.zero_grad()
    outs = [model.forward(batch) for batch in batches]
    (outs[0].loss + 3 * outs[1].loss).backward()
    close(by_name(user), {name: value + 3 * single[1][name] for name, value in single[0].items()})


def test_a_gradient_scaler_finds_scaled_gradients() -> None:
    user = built().float()
    model = gc.compile(user, plan=EAGER)
    batch = model.prepare_batch(texts(2))
    expected = reference(user, [batch])[1]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = torch.optim.SGD(user.parameters(), 0.0)
    scaler.scale(model.forward(batch).loss).backward()
    assert torch.allclose(user.head.weight.grad, 1024 * expected["head.weight"], rtol=1e-5)
    scaler.unscale_(optimizer)
    assert torch.allclose(user.head.weight.grad, expected["head.weight"], rtol=1e-5)
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize("retain", [False, True])
def test_backward_twice_is_an_error(retain: bool) -> None:
    user = built()
    model = gc.compile(user, plan=EAGER)
    out = model.forward(model.prepare_batch(texts(2)))
    out.loss.backward(retain_graph=retain)
    before = by_name(user)
    with pytest.raises(StepError, match=r"already\n  what to do: run forward again"):
        out.loss.backward()
    close(by_name(user), before)


def test_under_no_grad_it_evaluates() -> None:
    user = built()
    user.blocks[0] = nn.Sequential(user.blocks[0], nn.Dropout(0.5))
    model = gc.compile(user, plan=EAGER)
    batch = model.prepare_batch(texts(2))
    loss, _ = reference(built(), [batch])
    state = torch.get_rng_state()
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            out = model.forward(batch)
        assert not out.loss.requires_grad and out.loss.item() == pytest.approx(loss)
    assert model.training and torch.equal(state, torch.get_rng_state())
    with torch.no_grad():
        model.eval().forward(batch)
    assert not model.training and not user.training
    assert model.train().training and model.step.stats.steps == 0


def test_outputs_are_the_models_own() -> None:
    model = gc.compile(built(Several), plan=EAGER, outputs="all")
    batch = model.prepare_batch(texts(4))
    outputs = model.forward(batch).outputs
    assert outputs is not None and len(outputs) == 2
    assert gc.compile(model.model, plan=EAGER).forward(batch).outputs is None


class Named(nn.Module):
    """Its batch is a dict, which it takes whole."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def prepare_batch(self, inputs: dict[str, Any]) -> dict[str, Any]:
        return {"x": torch.tensor(inputs["x"]), **inputs.get("more", {})}

    def forward(self, batch: dict[str, Tensor]) -> Any:
        from tests.trainer.speaking import Scored

        y = self.layer(batch["x"])
        return Scored(gc.TokenLoss(y.square().sum(), y.numel()), y)


def test_a_dict_is_passed_whole_and_unread_fields_cost_nothing() -> None:
    user = Named()
    model = gc.compile(user, plan=EAGER)
    # The set of names selects a program; what stands in a field that nobody reads does not.
    for more in ({}, {"name": "a"}, {"name": "b"}, {"name": 3}, {"name": torch.ones(3)}):
        out = model.forward(model.prepare_batch({"x": [[1.0, 2.0, 3.0]], "more": more}))
        out.loss.backward()
    assert model.step.stats.traces == 2


def test_a_model_that_prepares_no_batches_is_refused() -> None:
    class Without(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x

    class Asks(Speaker):
        def forward(self, batch: Tokens, more: Tensor) -> Any:
            return batch

    for model in (Without(), Asks(), object()):
        with pytest.raises(PlanError, match=r"compile takes a model that prepares its own batches\n  where: "):
            gc.compile(model, plan=EAGER)
