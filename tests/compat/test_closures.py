"""What functions given to an operator close over: torch freezes it, and here it becomes an argument."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import flex_attention as public

from graphcomp.compat.closures import TakeFunctions, as_written_by_the_user
from graphcomp.compat.higher_order import FunctionsRefusedError
from graphcomp.compat.symbols import new_fake_mode
from graphcomp.compat.tracing import trace


def heads() -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = torch.randn(3, 1, 2, 5, 4, dtype=torch.float64).unbind()
    return q, k, v


def test_torch_refuses_gradients_on_a_cpu() -> None:
    q, k, v = heads()
    with pytest.raises(NotImplementedError, match="does not support backward on CPU"):
        public.flex_attention(q.requires_grad_(), k, v)
    before = public._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG, public._validate_device
    with as_written_by_the_user():
        public.flex_attention(q, k, v)
    assert before == (public._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG, public._validate_device)


def test_a_trace_of_torch_freezes_what_a_function_closes_over() -> None:
    """Dynamo would lift it, but looks at no function within a trace."""
    bias = torch.randn(5)

    def function(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        with as_written_by_the_user():
            return public.flex_attention(q, k, v, lambda s, b, h, i, j: s + bias[i])

    frozen = make_fx(function)(*heads(), bias)
    inner = [module for _, module in frozen.named_children()]
    assert any(node.op == "get_attr" for module in inner for node in module.graph.nodes)
    lifted = trace(function, (*heads(), bias))
    inner = [module for _, module in lifted.named_children()]
    assert not any(node.op == "get_attr" for module in inner for node in module.graph.nodes)
    given = heads()
    expected = function(*given, bias)
    torch.testing.assert_close(lifted(*given, bias), expected)


def test_a_size_known_at_run_time_only_is_no_argument() -> None:
    """A function is run on examples, and nothing says how large it is in these."""
    mode = new_fake_mode()
    number = mode.shape_env.create_unbacked_symint()  # type: ignore[union-attr]
    with mode, as_written_by_the_user(), TakeFunctions():
        q, k, v = torch.empty(3, 1, 2, 5, 4).unbind()
        with pytest.raises(FunctionsRefusedError, match="known at run time only"):
            public.flex_attention(q, k, v, lambda s, b, h, i, j: s * number)
