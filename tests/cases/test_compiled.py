"""What other cases show on the eager backend, in one model whose stages Inductor compiles."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphcomp import TokenLoss, mean_loss, metric, token_loss
from graphcomp.testing import VirtualStep
from tests.cases.tiny import IGNORED, assert_equal, relative, step_of, tiny_gpt
from tests.zoo import ZOO
from tests.zoo.reference import reference

pytestmark = pytest.mark.inductor
WORDS, WIDTH = 11, 8


class Everything(nn.Module):
    """A head tied to the embedding; numbers, a mask and places that skip a stage; buffers on two stages; parameters
    without gradient; an auxiliary loss of the first stage, and a number of the batch that scales it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.first, self.second = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.norm, self.last = nn.BatchNorm1d(WIDTH), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight
        self.unused, self.only_read, self.frozen = (nn.Parameter(torch.randn(WIDTH)) for _ in range(3))
        self.frozen.requires_grad_(False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens: Tensor, scale: Tensor) -> dict[str, Tensor]:
        self.seen += (tokens > 0).sum()
        start = self.embed(tokens)
        x = self.first(start.cumsum(1) / tokens.shape[1]).tanh() + self.only_read.detach()
        high, place, balance = x > 0, x.argmax(-1, keepdim=True), scale * x.square().mean()
        x = self.norm(self.second(x).flatten(0, 1)).view(x.shape) * self.frozen
        x = self.last(torch.where(high, x, x.flip(-1)) + start)
        value = x.gather(-1, place).squeeze(-1)
        return {"logits": self.head(x), "value": value, "balance": balance}


def losses(output: dict[str, Tensor], batch: dict[str, Tensor]) -> Any:
    wrong = (output["value"] - 1.0).square() * batch["weights"]
    named = {
        "lm": token_loss(output["logits"], batch["labels"]),
        "value": TokenLoss(wrong.sum(), batch["weights"]),
        "balance": mean_loss(output["balance"]),
    }
    right = (output["logits"].argmax(-1) == batch["labels"]).sum()
    return named, {"right": metric(right, "sum"), "largest": metric(output["value"].max(), "max")}


def batch(rows: int, length: int, seed: int, labelled: bool = True, scale: float = 0.1) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    tokens, labels = torch.randint(WORDS, (2, rows, length), generator=draw)
    weights = torch.rand(rows, length, generator=draw, dtype=torch.float64)
    unlabelled = torch.rand(rows, length, generator=draw) < (0.4 if labelled else 2.0)
    weights = weights.masked_fill(unlabelled, 0.0)
    labels = labels.masked_fill(unlabelled, IGNORED)
    scale = torch.tensor(scale, dtype=torch.float64)
    return {"tokens": tokens, "labels": labels, "weights": weights, "scale": scale}


def ragged() -> list[dict[str, Tensor]]:
    return [batch(3, 7, 0), batch(2, 5, 1, labelled=False), batch(4, 9, 2), batch(2, 3, 3)]


@functools.cache
def made(schedule: str, wrapper: str = "Python") -> tuple[nn.Module, VirtualStep]:
    """Double precision, so that what differs is no rounding."""
    model = tiny_gpt(Everything).double()
    options = {"cpp_wrapper": wrapper == "C++"}
    plan = {"schedule": schedule, "split": ["second", "last"], "backend": "inductor", "compile_options": options}
    return model, step_of(model, losses, **plan)


@pytest.mark.parametrize(("schedule", "wrapper"), [("gpipe", "Python"), ("1f1b", "Python"), ("1f1b", "C++")])
def test_a_step_equals_eager(schedule: str, wrapper: str) -> None:
    """Of any lengths, a microbatch without tokens among them; one alone runs forward and backward as one program."""
    model, step = made(schedule, wrapper)
    for given in (ragged(), ragged()[:1], ragged()[1:]):
        assert_equal(model, losses, given, step, 1e-9, outputs="all")
    assert step.compiler.traces == 1


def test_outputs_are_those_of_the_model() -> None:
    model, step = made("gpipe")
    expected = reference(model, losses, ragged()).outputs
    for found, wanted in zip(step.run(ragged(), "all").result.outputs, expected, strict=True):
        assert found.keys() == wanted.keys()
        for name in wanted:
            assert relative(found[name], wanted[name]) <= 1e-9


def test_a_step_without_tokens_is_exactly_zero() -> None:
    _, step = made("gpipe")
    ran = step.run([batch(2, 5, seed, labelled=False, scale=0.0) for seed in range(3)], "all")
    assert ran.result.loss == 0
    assert all(gradient is None or not gradient.any() for gradient in ran.gradients.values())


def test_what_changes_with_each_step_is_an_input() -> None:
    """And a scale of the loss, a power of two, scales gradients exactly."""
    model, step = made("gpipe")
    for scale in (0.1, 0.7):
        assert_equal(model, losses, [batch(3, 7, 0, scale=scale)] * 2, step, 1e-9, outputs="all")
    once, again = (step.run(ragged(), "all", loss_scale=scale).gradients for scale in (1.0, 1024.0))
    for name, gradient in once.items():
        assert gradient is None or torch.equal(again[name], 1024 * gradient), name
    assert step.compiler.traces == 1


def test_evaluation_equals_eager_and_changes_nothing() -> None:
    model, step = made("gpipe")
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    model.eval()
    expected = reference(model, losses, ragged(), backward=False)
    model.train()
    found = step.evaluate(ragged())
    assert relative(found.loss, expected.loss) <= 1e-9
    for name, value in expected.metrics.items():
        assert relative(found.metrics[name], torch.as_tensor(value)) <= 1e-9, name
    assert all(torch.equal(value, kept[name]) for name, value in model.state_dict().items())


class Half(nn.Module):
    """A product in `low`, a norm in `high`, and autocast around one layer."""

    def __init__(self, low: torch.dtype = torch.bfloat16, high: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.a, self.norm, self.b, self.c = nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.to(high)
        self.a.to(low)
        self.low, self.high = low, high

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.a(x.to(self.low)).to(self.high)).relu()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.low is torch.bfloat16):
            h = self.b(h)
        return self.c(h.to(self.high).tanh())


def square(output: Tensor, batch: Tensor) -> Tensor:
    return output.square().mean()


def test_half_precision_is_as_near_to_double_as_eager() -> None:
    """Where compiled code rounds is its own choice: it need not be equal, but no worse."""
    model, given = tiny_gpt(Half), [torch.randn(n, 16) for n in (30, 50)]
    double = Half(torch.float64, torch.float64)
    double.load_state_dict(model.state_dict())
    exact = reference(double, square, [x.bfloat16().double() for x in given]).gradients
    eager = reference(model, square, given).gradients
    ran = step_of(model, square, backend="inductor").run(given)
    for name, gradient in exact.items():
        found = ran.gradients[name]
        assert found.dtype == eager[name].dtype
        assert relative(found, gradient) <= 1.1 * relative(eager[name], gradient) + 1e-6, name


def compiled(name: str, stages: int, schedule: str) -> None:
    """A zoo model in double precision: as on the eager backend, which other tests compare with PyTorch."""
    case = ZOO[name]
    steps = [
        step_of(case.build().double(), case.loss_fn, stages, schedule, backend=backend)
        for backend in ("eager", "inductor")
    ]
    for number in (3, 2):
        found = []
        for step in steps:
            torch.manual_seed(5)  # a cut program draws from the step's seed
            found.append(step.run(case.microbatches(number, 3, torch.float64)))
        expected, ran = found
        largest = max(float(g.abs().max()) for g in expected.gradients.values())
        for key, gradient in expected.gradients.items():
            assert float((ran.gradients[key] - gradient).abs().max()) <= 1e-9 * largest, key
        assert relative(ran.result.loss, expected.result.loss) <= 1e-9
        for key, value in expected.result.metrics.items():
            assert relative(ran.result.metrics[key], value) <= 1e-9, key
    eager, other = (dict(step.model.named_buffers()) for step in steps)
    assert all(relative(other[key], buffer) <= 1e-9 for key, buffer in eager.items())
    assert all(step.compiler.traces == 1 for step in steps)


def test_masks_of_backward_are_those_of_forward() -> None:
    compiled("dropout", 2, "gpipe")


@pytest.mark.wide
@pytest.mark.parametrize(("stages", "schedule"), [(1, "1f1b"), (2, "gpipe"), (3, "1f1b"), (4, "interleaved-1f1b")])
@pytest.mark.parametrize("name", ZOO)
def test_the_zoo(name: str, stages: int, schedule: str) -> None:
    compiled(name, stages, schedule)
