"""Operators whose kernels take more than torch's fakes of them: the shim is needed, and says what the kernel says."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from graphcomp.compat.symbols import new_fake_mode


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
