"""Linear algebra: what it computes for matrices of any size, and what it raises for those that it cannot take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, linalg, nn

from graphcomp import mean_loss
from graphcomp.capture import capture
from graphcomp.ir.effects import is_check
from graphcomp.partition.partition import partition
from tests.cases.tiny import assert_equal, step_of


class Between(nn.Module):
    """A matrix for each row of the batch goes through a function between two layers."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function(x, self.first(x).tanh()))


def products(x: Tensor) -> Tensor:
    """Positive definite matrices whose number and size are those of a batch."""
    return x @ x.mT + torch.eye(x.shape[1], dtype=x.dtype)


def squared(y: Tensor, batch: Tensor) -> Any:
    return mean_loss(y.square().mean())


def singular_if_zero(x: Tensor, h: Tensor) -> Tensor:
    return linalg.solve(x.mT @ x, h.mT).mT


FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "solve": lambda x, h: linalg.solve(products(h), h),
    "solve with a matrix of the batch": lambda x, h: linalg.solve(products(x), h),
    "inv": lambda x, h: linalg.inv(products(h)) @ h,
    "slogdet": lambda x, h: h * linalg.slogdet(products(h))[1][:, None, None],
    "cholesky": lambda x, h: linalg.cholesky(products(h)) @ h,
    "solve_triangular": lambda x, h: linalg.solve_triangular(products(h).tril(), h, upper=False),
    "cholesky_solve": lambda x, h: torch.cholesky_solve(h, linalg.cholesky(products(x))),
    "qr": lambda x, h: linalg.qr(products(h))[0] @ h,
    "pinv": lambda x, h: linalg.pinv(products(h)) @ h,
    "a padded transform": lambda x, h: h * torch.fft.rfft(h, n=16, dim=1).abs().sum(1, keepdim=True),
    "in place before": lambda x, h: linalg.inv(products(h).mul_(2).add_(1)) @ h,
}
BATCHES = (3, 5, 4), (2, 6, 4)


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_one_program_for_all_sizes(name: str, stages: int) -> None:
    torch.manual_seed(0)
    model = Between(FUNCTIONS[name])
    step = step_of(model, squared, **({"split": ["last"]} if stages == 2 else {}))
    assert_equal(model, squared, [torch.randn(shape) for shape in BATCHES], step, tolerance=1e-4)
    assert step.compiler.traces == 1


@pytest.mark.parametrize("stages", [1, 2])
def test_a_singular_matrix_is_an_error_as_in_eager(stages: int) -> None:
    torch.manual_seed(0)
    model = Between(singular_if_zero)
    step = step_of(model, squared, **({"split": ["last"]} if stages == 2 else {}))
    right, wrong = [torch.randn(2, 6, 4)], [torch.zeros(3, 5, 4)]
    assert_equal(model, squared, right, step, tolerance=1e-3)
    with pytest.raises(linalg.LinAlgError, match="input matrix is singular"):
        model(wrong[0])
    with pytest.raises(linalg.LinAlgError, match="input matrix is singular"):
        step.run(wrong)


def test_a_check_is_on_the_stage_of_what_it_checks() -> None:

    class Inverse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.eye(4))
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.first(x) @ linalg.inv(self.weight))

    checks = [
        program.name
        for stage in partition(capture(Inverse(), squared, torch.randn(3, 4)), split=["last"]).stages
        for program in stage.programs
        if any(map(is_check, program.calls()))
    ]
    assert checks == ["stage 0 forward"]


@pytest.mark.inductor
def test_compiled_code_checks_too() -> None:
    torch.manual_seed(0)
    model = Between(singular_if_zero)
    step = step_of(model, squared, split=["last"], backend="inductor")
    assert_equal(model, squared, [torch.randn(shape) for shape in ((2, 6, 4), (3, 7, 4))], step, tolerance=1e-3)
    with pytest.raises(linalg.LinAlgError, match="input matrix is singular"):
        step.run([torch.zeros(3, 5, 4)])
