"""Operators whose kernels take more than torch's fakes of them: the shim is needed, and says what the kernel says."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from graphcomp.compat.fakes import second_attempts_unlogged
from graphcomp.compat.symbols import expression, fake_batch_leaf, new_fake_mode


def grouped(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    left, right = torch.randn(7, 16).to(dtype), torch.randn(3, 8, 16).to(dtype)
    return left, right.transpose(-2, -1), torch.tensor([3, 3, 7], dtype=torch.int32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_grouped_product_has_the_form_that_the_kernel_gives_it(dtype: torch.dtype) -> None:
    given = grouped(dtype)
    mode = new_fake_mode()
    with mode:
        fake = torch.nn.functional.grouped_mm(*map(mode.from_tensor, given[:2]), offs=mode.from_tensor(given[2]))
    real = torch.nn.functional.grouped_mm(*given[:2], offs=given[2])
    assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)


def test_the_shim_is_still_needed() -> None:
    given = grouped(torch.float32)
    mode = FakeTensorMode()
    with mode, pytest.raises(RuntimeError, match="BF16"):
        torch.nn.functional.grouped_mm(*map(mode.from_tensor, given[:2]), offs=mode.from_tensor(given[2]))


WANT_PLAIN_SIZES: list[Callable[[Tensor], Tensor]] = [
    lambda x: torch.linalg.solve_triangular(x @ x.mT, x, upper=False),
    lambda x: torch.cholesky_solve(x, x @ x.mT),
    lambda x: torch.addbmm(x[0], x @ x.mT, x),
    lambda x: torch.baddbmm(x[:1], x @ x.mT, x),
]


@pytest.mark.parametrize("function", WANT_PLAIN_SIZES)
def test_sizes_stay_symbolic_where_an_operator_wants_plain_ones(
    function: Callable[[Tensor], Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    mode = new_fake_mode()
    x = fake_batch_leaf(mode, torch.empty(3, 5, 4), "x")
    with second_attempts_unlogged():
        found = function(x)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
    free = [size for size in found.shape if not isinstance(expression(mode, size), int)]
    assert found.shape == function(torch.rand(3, 5, 4)).shape and len(free) == found.dim()


@pytest.mark.parametrize("function", WANT_PLAIN_SIZES)
def test_torch_alone_refuses_them(function: Callable[[Tensor], Tensor]) -> None:
    ours = new_fake_mode()
    plain = FakeTensorMode(shape_env=ours.shape_env)
    with pytest.raises(RuntimeError, match="expected to contain only concrete integers"):
        function(fake_batch_leaf(plain, torch.empty(3, 5, 4), "x"))
