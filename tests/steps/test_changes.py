"""What changes between steps: inputs and model state select a program, or are refused; a failed step leaves nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

import graphcomp as gc
from graphcomp.errors import BatchError, CaptureError, GuardError
from tests.steps.test_step import equals, gradients
from tests.zoo.reference import reference


class Scaled(nn.Module):
    """A layer with everything that a program may depend on besides the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 2)
        self.drop = nn.Dropout(0.5)
        self.scale = 2.0
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor, mode: str = "plain", power: int = 1, bias: Tensor | None = None) -> Tensor:
        self.seen.add_(x.shape[0])
        y = self.second(self.drop(self.first(x).relu())) * self.scale
        if mode == "flipped":
            y = -y
        return y**power if bias is None else y**power + bias


def mean(output: Tensor, batch: dict[str, Any]) -> Tensor:
    return output.square().mean()


def batch(rows: int = 3, **more: Any) -> dict[str, Any]:
    return {"x": torch.randn(rows, 4), **more}


class Check:
    """A step and its eager reference, side by side."""

    def __init__(self, model: nn.Module | None = None, loss_fn: Callable[..., Any] = mean, **options: Any) -> None:
        self.model, self.loss_fn = model or Scaled(), loss_fn
        self.step = gc.compile_train_step(self.model, loss_fn, plan=gc.Plan(backend="eager", quiet=True, **options))

    def __call__(self, *batches: Any, traces: int) -> None:
        """A step with these microbatches equals eager, after this many captures in all."""
        self.model.zero_grad()
        torch.manual_seed(7)
        # A step takes dense copies of what is strided, whose products some matrix libraries round in another way.
        dense = [tree_map_only(torch.Tensor, lambda leaf: leaf.contiguous(), one) for one in batches]
        expected = reference(self.model, self.loss_fn, dense)
        torch.manual_seed(7)
        equals(self.step(list(batches)), self.model, expected)
        assert self.step.stats.traces == traces


def test_structures_and_plain_values_select_programs() -> None:
    check = Check(max_programs=20)
    check(batch(), traces=1)
    check(batch(mode="flipped"), batch(), traces=2)
    check(batch(power=2), batch(power=3), traces=4)
    check(batch(bias=None), batch(bias=torch.ones(2)), traces=6)
    check(batch(bias=torch.ones(2)), batch(mode="flipped"), batch(power=3), batch(bias=None), batch(), traces=6)
    check({**batch(), "power": True}, traces=7)
    check((torch.randn(3, 4),), torch.randn(2, 4), traces=9)


def test_dtype_and_rank_of_a_tensor_select_programs() -> None:
    check = Check(nn.Sequential(nn.Linear(4, 2)), lambda output, _: output.double().square().mean())
    check(torch.randn(3, 4), traces=1)
    check(torch.randn(5, 3, 4), torch.randn(2, 4), traces=2)
    check(torch.randn(4), traces=3)
    check(torch.randn(4, 3).T, torch.randn(6, 4)[::2], traces=3)


def test_a_field_that_nobody_reads_needs_no_program_of_its_own_size() -> None:
    check = Check()
    check(batch(3, unread=torch.zeros(7)), traces=1)
    check(batch(2, unread=torch.zeros(9)), traces=1)


def test_too_many_programs_names_what_keeps_changing() -> None:
    check = Check(max_programs=2)
    check(batch(power=1), traces=1)
    check(batch(power=2), traces=2)
    before = [grad.clone() for grad in gradients(check.model).values() if grad is not None]
    with pytest.raises(GuardError) as caught:
        check.step([batch(power=3)])
    text = str(caught.value)
    assert text.startswith(
        "another specialisation is needed, but 2 were made already\n"
        "  where: the batch was {x: float32[3, 4], power: 2} and is {x: float32[3, 4], power: 3}\n"
        "  expected: inputs and model state that one of the compiled programs serves\n"
        "  what to do: keep it fixed, pass it as a tensor, or raise Plan(max_programs=...); a capture took"
    )
    check.model.scale = 5.0
    with pytest.raises(GuardError, match=r"where: 'scale' of the model was 2\.0 and is 5\.0\n"):
        check.step([batch(power=1)])
    check.model.scale = 2.0
    for grad, kept in zip(gradients(check.model).values(), before, strict=True):
        assert grad is not None and torch.equal(grad, kept)
    check(batch(power=2), batch(power=1), traces=2)


def test_a_changed_model_is_followed() -> None:
    check = Check(max_programs=20)
    model = check.model
    check(batch(), traces=1)
    model.scale = 4.0
    check(batch(), traces=2)
    model.scale = 2.0
    check(batch(), traces=2)
    model.eval()
    check(batch(), traces=3)
    model.train()
    model.drop.p = 0.1
    check(batch(), traces=4)
    model.first.requires_grad_(False)
    check(batch(), traces=5)
    assert model.first.weight.grad is None
    model.first.requires_grad_(True)
    check(batch(), traces=5)
    model.second = nn.Linear(8, 2)  # of the same form: the same program, with the new parameters
    check(batch(), traces=5)
    model.second.weight = nn.Parameter(torch.zeros(2, 8))
    check(batch(), traces=5)
    model.first.weight.data = torch.ones(8, 4)
    check(batch(), traces=5)
    model.register_buffer("seen", torch.full((), 40_840, dtype=torch.int64))
    check(batch(), traces=5)
    model.second = nn.Linear(8, 2, bias=False)
    check(batch(), traces=6)


def test_a_closure_tensor_is_read_at_each_step() -> None:
    weight = torch.ones(2)

    def weighted(output: Tensor, batch: dict[str, Any]) -> Tensor:
        return (output * weight).square().mean()

    check = Check(loss_fn=weighted)
    check(batch(), traces=1)
    weight.mul_(3)
    check(batch(), traces=1)
    weight = torch.tensor([0.5, 0.0])
    check(batch(), traces=1)
    weight = torch.full((3, 2), 2.0)
    check(batch(), traces=2)
    weight = torch.ones(2, dtype=torch.float64)
    check(batch(), traces=3)
    weight = torch.ones(2)
    check(batch(), traces=3)


def test_a_closure_number_selects_a_program() -> None:
    smoothing = 0.0

    def smoothed(output: Tensor, batch: dict[str, Any]) -> Tensor:
        return F.cross_entropy(output, batch["labels"], label_smoothing=smoothing)

    check = Check(loss_fn=smoothed)
    batches = [batch(n, labels=torch.randint(2, (n,))) for n in (3, 4)]
    check(*batches, traces=1)
    smoothing = 0.1
    check(*batches, traces=2)


class Fails(nn.Module):
    """Raises for one kind of batch, while it is traced."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop, self.layer = nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2)

    def forward(self, x: Tensor, fail: str = "no") -> Tensor:
        y = self.drop(self.norm(x))
        if fail == "user":
            raise KeyError("from the model")
        if fail == "contents" and y.sum() > 0:
            return y
        return self.layer(y)


BAD: list[tuple[Any, type[Exception], str]] = [
    (batch(fail="user"), KeyError, "from the model"),
    (batch(fail="contents"), CaptureError, "the code decides on the contents of a tensor"),
    ({"y": torch.ones(3, 4)}, BatchError, "the model's forward needs x, which the batch does not hold"),
    ({"x": torch.ones(3, 4, requires_grad=True)}, BatchError, "the batch tensor x requires a gradient"),
    ({"x": torch.ones(3, 4), "fail": bytearray(b"a")}, BatchError, "the batch holds a bytearray"),
    (batch(5)["x"][:, :3], RuntimeError, "running_mean should contain"),
]


@pytest.mark.parametrize("good_first", [True, False])
@pytest.mark.parametrize(("bad", "kind", "text"), BAD, ids=[text for _, _, text in BAD])
def test_a_failed_step_leaves_everything_as_it_was(bad: Any, kind: type, text: str, good_first: bool) -> None:
    check = Check(Fails())
    model = check.model
    if good_first:
        check(batch(), traces=1)
    tries = ([bad], [batch(), bad], [batch(fail="not"), bad])
    state, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    kept = {name: None if grad is None else grad.clone() for name, grad in gradients(model).items()}
    attributes = {name: list(vars(module)) for name, module in model.named_modules()}
    for batches in tries:
        with pytest.raises(kind, match=text):
            check.step(batches)
    assert torch.equal(random, torch.get_rng_state())
    assert attributes == {name: list(vars(module)) for name, module in model.named_modules()}
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
    for name, grad in gradients(model).items():
        assert grad is None if kept[name] is None else torch.equal(grad, kept[name])
    assert check.step.stats.steps == good_first
    model.zero_grad()
    torch.manual_seed(5)
    good = [batch(), batch(4)]
    torch.manual_seed(6)
    expected = reference(model, mean, good)
    torch.manual_seed(6)
    equals(check.step(good), model, expected)


def test_a_user_error_says_where_it_was_raised() -> None:
    with pytest.raises(KeyError) as caught:
        Check(Fails()).step([batch(fail="user")])
    note = "\n".join(caught.value.__notes__)
    assert "while tracing forward of Fails" in note and "test_changes.py" in note


def test_a_loss_that_fails_at_first_can_be_mended() -> None:
    broken = True

    def loss_fn(output: Tensor, batch: dict[str, Any]) -> Tensor:
        if broken:
            raise ValueError("not yet")
        return output.square().mean()

    check = Check(loss_fn=loss_fn)
    with pytest.raises(ValueError, match="not yet"):
        check.step([batch()])
    broken = False
    check(batch(), traces=1)
