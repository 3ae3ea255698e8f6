"""Operators that take functions: the shims are needed, and do what torch does where torch does it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._higher_order_ops.flex_attention import flex_attention as operator
from torch._higher_order_ops.flex_attention import flex_attention_fake_impl, sdpa_dense, sdpa_dense_backward
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from graphcomp.compat.higher_order import FAKES, PLAIN


def heads() -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = torch.randn(3, 1, 2, 5, 4, dtype=torch.float64).unbind()
    return q, k, v


def test_torchs_fake_has_another_precision_than_the_kernel() -> None:
    mask = (5, 5, *(None,) * 12, 128, 128, lambda b, h, i, j: i >= j)
    given = (*heads(), lambda s, b, h, i, j: s, mask, 0.5, {})
    real = sdpa_dense(*given)
    with FakeTensorMode() as mode:
        fakes = (*map(mode.from_tensor, given[:3]), *given[3:])
        assert flex_attention_fake_impl(*fakes)[1].dtype != real[1].dtype
        found = FAKES[operator](*fakes)
    for fake, one in zip(found, real, strict=True):
        assert (fake.shape, fake.stride(), fake.dtype) == (one.shape, one.stride(), one.dtype)
    for one, other in zip(PLAIN[operator](*given), real, strict=True):
        assert torch.equal(one, other)


def test_torchs_backward_makes_no_gradient_for_a_value_that_requires_none() -> None:
    """As none does in a program that runs."""
    q, k, v = heads()
    mask = (5, 5, *(None,) * 12, 128, 128, lambda b, h, i, j: i >= j)

    def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor, gain: Tensor) -> Tensor:
        return s * gain[0]

    def joint(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor, g: Tensor, gain: Tensor) -> list[Tensor | None]:
        return [g * gain[0], None, None, None, None, torch.ops.flex_lib.zeros_and_scatter([1], [b * 0], g * s)]

    numbers = [torch.zeros((), dtype=torch.int)] * 4
    graph = make_fx(joint)(torch.zeros(()), *numbers, torch.zeros(()), torch.zeros(1))
    value = torch.tensor([1.5], dtype=torch.float64)
    out, statistic, _ = sdpa_dense(q, k, v, score, mask, 0.5, {}, (value,), ())
    given = (q, k, v, out, statistic, torch.ones_like(out), None, score, graph, mask, 0.5, {}, (value,), ())
    assert sdpa_dense_backward(*given)[3] == (None,)
