"""Random small models: any chain with skips, shared layers, several inputs and dtypes equals eager at any cut."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from graphcomp import TokenLoss
from graphcomp.errors import PartitionError
from graphcomp.plan import SCHEDULES
from tests.cases.tiny import assert_equal, step_of

WIDTH = 4


@dataclass(frozen=True)
class Layer:
    """kind: what is computed. weight: which of the model's layers (shared if used twice). skip: an earlier value."""

    kind: str
    weight: int
    skip: int


KINDS = ("linear", "norm", "gate", "transpose", "cumsum", "double", "half_width", "second_input", "mask", "detach")


class RandomModel(nn.Module):
    def __init__(self, layers: tuple[Layer, ...], frozen: frozenset[int]) -> None:
        super().__init__()
        self.plan = layers
        self.weights = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        for number in frozen:
            self.weights[number].requires_grad_(False)
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, other: Tensor, rows: Tensor) -> Tensor:
        values = [x]
        for layer in self.plan:
            now, weight = values[-1], self.weights[layer.weight]
            match layer.kind:
                case "linear":
                    new = torch.tanh(weight(now))
                case "norm":
                    new = nn.functional.layer_norm(weight(now), (WIDTH,))
                case "gate":
                    new = now * torch.sigmoid(weight(values[layer.skip % len(values)]))
                case "transpose":
                    new = weight(now).transpose(0, 1).softmax(-1).transpose(0, 1)
                case "cumsum":
                    new = weight(now.cumsum(0) / now.shape[0])
                case "double":
                    new = weight(now).double().sin().to(now.dtype)
                case "half_width":
                    first, second = weight(now).chunk(2, -1)
                    new = torch.cat([second, first.relu()], -1)
                case "second_input":
                    new = now + weight(other)[: now.shape[0]]
                case "mask":
                    new = weight(now).masked_fill((rows > 1)[:, None], 0.5)
                case _:
                    new = now + weight(now).detach()
            values.append(new + 0.5 * values[layer.skip % len(values)])
        return self.last(values[-1])


def loss_fn(y: Tensor, batch: dict[str, Tensor]) -> tuple[dict, dict]:
    tail = TokenLoss((y[1:] ** 3).sum(), batch["rows"])
    return {"all": TokenLoss(y.square().sum(), y.numel()), "tail": tail}, {"mean": y.mean()}


layers = st.builds(Layer, st.sampled_from(KINDS), st.integers(0, 2), st.integers(0, 5))


@settings(max_examples=25)
@given(
    plan=st.lists(layers, min_size=1, max_size=6).map(tuple),
    frozen=st.frozensets(st.integers(0, 2), max_size=2),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    rows=st.lists(st.integers(3, 6), min_size=1, max_size=4),
    stages=st.integers(1, 4),
    schedule=st.sampled_from(SCHEDULES),
)
def test_virtual_ranks_equal_eager(
    plan: tuple[Layer, ...],
    frozen: frozenset[int],
    dtype: torch.dtype,
    rows: list[int],
    stages: int,
    schedule: str,
) -> None:
    model = RandomModel(plan, frozen).to(dtype)
    microbatches = [
        {
            "x": torch.randn(number, WIDTH, dtype=dtype),
            "other": torch.randn(number + 1, WIDTH, dtype=dtype),
            "rows": torch.randint(3, (number,)),
        }
        for number in rows
    ]
    step = step_of(model, loss_fn, stages, schedule)
    try:
        assert_equal(model, loss_fn, microbatches, step, 1e-4 if dtype is torch.float32 else 1e-9)
    except PartitionError as error:  # fewer operations with parameters than stages
        assert stages > 1 and "cannot be cut" in str(error)
    assert step.compiler.traces == 1
