"""Code that depends on contents but keeps its shapes: routing, counting and choosing, with experts that get nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graphcomp import TokenLoss
from tests.cases.tiny import assert_equal, step_of

EXPERTS, WIDTH, USED = 4, 8, 2


class Routed(nn.Module):
    """A router, experts of which only two ever get a row, and a layer behind them."""

    def __init__(self, mix: Callable[[Routed, Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.mix = mix
        self.router, self.last = nn.Linear(WIDTH, EXPERTS), nn.Linear(WIDTH, WIDTH)
        self.weights = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / 3)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x)[:, :USED].softmax(-1)
        best, chosen = scores.max(-1)
        return self.last(x + self.mix(self, x, best, chosen))


def in_a_loop(model: Routed, x: Tensor, best: Tensor, chosen: Tensor) -> Tensor:
    mixed = torch.zeros_like(x)
    for number, weight in enumerate(model.weights):
        mixed = mixed + (x @ weight) * (best * (chosen == number))[:, None]
    return mixed


def one_hot(model: Routed, x: Tensor, best: Tensor, chosen: Tensor) -> Tensor:
    return torch.einsum("rw,re,ewv->rv", x, F.one_hot(chosen, EXPERTS).to(x.dtype) * best[:, None], model.weights)


def gathered(model: Routed, x: Tensor, best: Tensor, chosen: Tensor) -> Tensor:
    return torch.bmm(x[:, None], model.weights[chosen])[:, 0] * best[:, None]


def in_place(model: Routed, x: Tensor, best: Tensor, chosen: Tensor) -> Tensor:
    mixed = torch.zeros_like(x)
    for number, weight in enumerate(model.weights):
        mixed[:] = torch.where((chosen == number)[:, None], x @ weight, mixed)
    mixed[chosen == EXPERTS] = 0.0
    mixed *= best[:, None]
    return mixed


def sorted_rows(model: Routed, x: Tensor, best: Tensor, chosen: Tensor) -> Tensor:
    order = chosen.argsort(stable=True)
    ends = F.one_hot(chosen, EXPERTS).sum(0).cumsum(0)
    numbers = torch.searchsorted(ends, torch.arange(x.shape[0]), right=True)
    results = torch.bmm(x[order][:, None], model.weights[numbers])[:, 0]
    return torch.empty_like(results).index_copy(0, order, results) * best[:, None]


def with_capacity(model: Routed, x: Tensor, best: Tensor, chosen: Tensor) -> Tensor:
    capacity = x.shape[0]
    hot = F.one_hot(chosen, EXPERTS)
    places = chosen * capacity + (hot.cumsum(0) * hot).sum(-1) - 1
    slots = x.new_zeros(EXPERTS * capacity, WIDTH).index_copy(0, places, x)
    results = torch.bmm(slots.view(EXPERTS, capacity, WIDTH), model.weights).flatten(0, 1)
    return results[places] * best[:, None]


def total(y: Tensor, batch: Tensor) -> TokenLoss:
    return TokenLoss(y.square().sum(), batch.shape[0])


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("mix", [in_a_loop, one_hot, gathered, in_place, sorted_rows, with_capacity])
def test_routing_with_fixed_shapes(mix: Callable[[Routed, Tensor, Tensor, Tensor], Tensor], stages: int) -> None:
    torch.manual_seed(3)
    model = Routed(mix).double()
    batches = [torch.randn(rows, WIDTH, dtype=torch.float64) for rows in (6, 3, 9)]
    step = step_of(model, total, stages)
    ran, _ = assert_equal(model, total, batches, step, 1e-10)
    assert step.compiler.traces == 1
    assert not ran.gradients["weights"][USED:].count_nonzero() and ran.gradients["weights"][0].count_nonzero()


def grouped(model: Routed, x: Tensor, best: Tensor, chosen: Tensor) -> Tensor:
    order = chosen.argsort(stable=True)
    ends = F.one_hot(chosen, EXPERTS).sum(0).cumsum(0).to(torch.int32)
    results = F.grouped_mm(x[order], model.weights, offs=ends)
    return results[order.argsort(stable=True)] * best[:, None]


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.inductor)])
def test_grouped_products_of_single_precision(backend: str) -> None:
    model = Routed(grouped)
    step = step_of(model, total, 2, backend=backend)
    assert_equal(model, total, [torch.randn(rows, WIDTH) for rows in (6, 3, 9)], step)
    assert step.compiler.traces == 1


def test_the_backward_of_an_operation_in_place_stays_on_its_stage() -> None:
    """Its operands are sent nowhere, though autograd copies what is overwritten."""

    class Scales(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                best, _ = layer(x).sigmoid().topk(WIDTH, dim=-1)
                best /= best.sum(-1, keepdim=True)
                x = x + best
            return x

    model = Scales()
    step = step_of(model, total, split=["layers.1"])
    assert_equal(model, total, [torch.randn(rows, WIDTH) for rows in (4, 5)], step)
    cut = step.latest[0].specialisation.partitions[False]
    assert [len(cut.forward_boundaries[0].values), len(cut.backward_boundaries[1].values)] == [1, 1]
