"""Operators that some devices have no kernel for: captured where there is one, refused by name elsewhere."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn

from graphcomp.capture import capture
from graphcomp.compat.symbols import new_fake_mode
from graphcomp.compat.tracing import trace
from graphcomp.errors import CaptureError
from graphcomp.losses import TokenLoss


class Packed(nn.Module):
    """Documents one behind the other, of which `starts` says where they begin and where the last one ends."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x: Tensor, starts: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(x.shape[0], 3, 2, 4).unbind(1)
        return varlen_attn(q, k, v, starts, starts, x.shape[0], x.shape[0], window_size=(-1, 0)).flatten(1)


def test_varlen_attn_on_a_cpu_is_refused_by_name() -> None:
    batch = {"x": torch.randn(7, 8), "starts": torch.tensor([0, 3, 7], dtype=torch.int32)}
    with pytest.raises(CaptureError, match="varlen_attn, for which torch has no kernel on this device") as caught:
        capture(Packed(), lambda y, b: TokenLoss(y.sum(), b["x"].shape[0]), batch)
    line = Packed.forward.__code__.co_firstlineno + 2
    assert f"test_devices.py:{line}" in str(caught.value) and "flex_attention with a mask" in str(caught.value)


def test_varlen_attn_is_traced_with_its_backward_where_there_is_a_kernel() -> None:
    mode = new_fake_mode()  # where the kernel is does not matter here
    with mode:
        x = torch.empty(7, 2, 4, requires_grad=True)
        starts = torch.empty(3, dtype=torch.int32)

    def function(x: Tensor, starts: Tensor) -> Tensor:
        y = varlen_attn(x, x, x, starts, starts, 4, 4)
        return torch.autograd.grad(y.float().sum(), x)[0]

    with mode:
        graph = trace(function, (x, starts)).graph
    called = [node.target.name() for node in graph.nodes if hasattr(node.target, "name")]
    assert [name for name in called if "varlen" in name] == [
        "torch_attn::_varlen_attn",
        "torch_attn::_varlen_attn_backward",
    ]
