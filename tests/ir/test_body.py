"""Functions that operators take, in all that is done with programs."""
# ruff: noqa: E501  (programs are as wide as they print)

from __future__ import annotations

from typing import Any

import pytest
import torch
from expecttest import TestCase

from graphcomp.errors import VerifyError
from graphcomp.ir import meta
from graphcomp.ir.body import Body, bodies_of
from graphcomp.ir.comparable import comparable
from graphcomp.ir.digest import digest
from graphcomp.ir.interp import boxed_callable, ordered, trace_values
from graphcomp.ir.pickling import from_bytes, to_bytes
from graphcomp.ir.program import Program
from graphcomp.ir.signature import BatchLeaf, Denominator, Grad, LossScale, Output, Param, Size
from graphcomp.ir.verify import verify
from tests.ir.functions import Attention, attention, calls, example


def inputs(program: Program, model: Attention, x: torch.Tensor) -> dict[Any, Any]:
    given: dict[Any, Any] = {}
    for what, node in program.input_nodes():
        match what:
            case Param():
                given[what] = model.slope.detach()
            case BatchLeaf():
                given[what] = x
            case Size():
                expression = str(meta.value(node))
                given[what] = x.shape[
                    [str(n) for n in program.input(BatchLeaf("batch")).meta["val"].shape].index(expression)
                ]
            case Denominator() | LossScale():
                given[what] = torch.ones((), dtype=meta.tensor(node).dtype)  # type: ignore[union-attr]
    return given


def written_out(model: Attention, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What the model computes, and the gradient of its slope."""
    slope = model.slope.detach().clone().requires_grad_()
    places = torch.arange(x.shape[2])
    scores = x @ x.transpose(-2, -1) / 2.0 - slope[:, None, None] * (places[:, None] - places).abs() ** model.power
    y = (2 if model.twice else 1) * (scores.softmax(-1) @ x)
    y.square().sum().backward()
    return y.detach(), slope.grad


@pytest.mark.parametrize("length", [5, 8])
def test_interpreted_it_computes_what_is_written(length: int) -> None:
    program, model, x = attention(), Attention(), example(2, length)
    given = inputs(program, model, x)
    expected, gradient = written_out(model, x)
    results = dict(zip(program.outputs, boxed_callable(program)(ordered(program, given)), strict=True))
    torch.testing.assert_close(results[Output("output")], expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(results[Grad("slope")], gradient, rtol=1e-12, atol=1e-12)
    # Node by node, too.
    values = dict(trace_values(program, given))
    torch.testing.assert_close(values[program.output(Grad("slope"))], gradient, rtol=1e-12, atol=1e-12)


def test_equal_calls_are_merged_and_unused_ones_removed() -> None:
    program = attention()
    assert len(calls(program, "flex_attention")) == 1  # of two
    (call,) = calls(program, "flex_attention_backward")[:1]
    assert len(bodies_of(call)) == 3
    assert not [node for node in program.calls() if not node.users]


def test_what_functions_compute_is_part_of_the_digest_and_of_what_ranks_compare() -> None:
    one, same, other = (attention(power) for power in (2.0, 2.0, 3.0))
    assert digest(one) == digest(same) != digest(other)
    assert comparable(one) == comparable(same) != comparable(other)
    (first,), (second,), (third,) = (bodies_of(calls(p, "flex_attention")[0])[:1] for p in (one, same, other))
    assert first == second and hash(first) == hash(second) and first != third


def test_copies_share_them_and_files_hold_them() -> None:
    program = attention()
    assert str(program.copy()) == str(program)
    again = from_bytes(to_bytes(program))
    verify(again, made_by="reading back")
    assert str(again) == str(program) and digest(again) == digest(program)
    model, x = Attention(), example(2, 6)
    given = [ordered(one, inputs(one, model, x)) for one in (program, again)]
    for a, b in zip(boxed_callable(program)(given[0]), boxed_callable(again)(given[1]), strict=True):
        assert torch.equal(a, b)


def broken(change: Any) -> VerifyError:
    program = attention(twice=False)
    call = calls(program, "flex_attention")[0]
    body = bodies_of(call)[0]
    copy = torch.fx.Graph()
    copy.output(copy.graph_copy(body.graph, {}))
    change(copy)
    call.args = tuple(Body(copy) if part == body else part for part in call.args)
    with pytest.raises(VerifyError, match="rule 'functions'") as caught:
        verify(program)
    return caught.value


def test_a_function_that_does_more_than_compute() -> None:
    def draw(graph: torch.fx.Graph) -> None:
        last = next(node for node in reversed(graph.nodes) if node.op == "call_function")
        last.target = torch.ops.aten.rand_like.default

    def write(graph: torch.fx.Graph) -> None:
        last = next(node for node in reversed(graph.nodes) if node.op == "call_function")
        last.target = torch.ops.aten.add_.Tensor

    def attribute(graph: torch.fx.Graph) -> None:
        next(node for node in graph.nodes if node.op == "call_function").op = "get_attr"

    assert "does more than compute its result" in str(broken(draw))
    assert "does more than compute its result" in str(broken(write))
    assert "is no call of an operator" in str(broken(attribute))


def test_a_function_where_none_is_taken_and_an_unknown_operator() -> None:
    program = attention(twice=False)
    call = calls(program, "flex_attention")[0]
    call.target = torch.ops.higher_order.cond
    with pytest.raises(VerifyError, match="calls an operator that nothing is known of"):
        verify(program)
    call.target = torch.ops.aten.clone.default
    with pytest.raises(VerifyError, match="is given a function"):
        verify(program)


class TestText(TestCase):
    maxDiff = None

    def test_functions_stand_at_the_end_each_once(self) -> None:
        self.assertExpectedInline(
            str(attention(twice=False)),
            """\
joint program "joint"
  %slope: f64[2] = param slope
  %batch: f64[s0, s1, s2, 4] = batch batch
  %denominator_loss: i64[] = denominator loss
  %loss_scale: f64[] = loss_scale
  %s0: int = size s0
  %s1: int = size s1
  %s2: int = size s2
forward:
  %ones: i32[1, 1, 1] = ones([1, 1, 1], dtype=i32, device=cpu, pin_memory=False)  # (root)  functions.py:28
  %zeros: i32[1, 1, 1, 1] = zeros([1, 1, 1, 1], dtype=i32, device=cpu, pin_memory=False)  # (root)  functions.py:28
  %new_zeros: i32[1, 1, 1, 2] = new_zeros(%zeros, [1, 1, 1, 2], dtype=i32, pin_memory=False)  # (root)  functions.py:28
  %arange: i32[1] = arange(1, dtype=i32, device=cpu, pin_memory=False)          # (root)  functions.py:28
  %unsqueeze: i32[1, 1] = unsqueeze(%arange, -1)                                # (root)  functions.py:28
  %unsqueeze_1: i32[1, 1, 1, 1] = unsqueeze(%ones, 3)                           # (root)  functions.py:28
  %lt: bool[1, 1, 1, 1] = lt.Tensor(%arange, %unsqueeze_1)                      # (root)  functions.py:28
  %scalar_tensor: i32[] = scalar_tensor(1, dtype=i32, layout=strided, device=cpu)  # (root)  functions.py:28
  %where: i32[1, 1, 1, 1] = where.self(%lt, %zeros, %scalar_tensor)             # (root)  functions.py:28
  %new_ones: i32[1, 1] = new_ones(%new_zeros, [1, 1], pin_memory=False)         # (root)  functions.py:28
  %arange_2: i64[1] = arange(1, dtype=i64, layout=strided, device=cpu)          # (root)  functions.py:28
  %unsqueeze_2: i64[1, 1] = unsqueeze(%arange_2, -1)                            # (root)  functions.py:28
  %unsqueeze_3: i64[1, 1, 1] = unsqueeze(%unsqueeze_2, -1)                      # (root)  functions.py:28
  %view: i32[1, 1, 1, 1] = view(%new_ones, [1, 1, 1, 1])                        # (root)  functions.py:28
  %unsqueeze_6: i64[1, 1, 1, 1] = unsqueeze(%unsqueeze_3, -1)                   # (root)  functions.py:28
  %index_put: i32[1, 1, 1, 2] = index_put(%new_zeros, [%unsqueeze_6, %unsqueeze_3, %unsqueeze, %where], %view)  # (root)  functions.py:28
  %slice_1: i32[1, 1, 1, 1] = slice.Tensor(%index_put, 3, 0, 1)                 # (root)  functions.py:28
  %transpose: i32[1, 1, 1, 1] = transpose.int(%slice_1, -2, -1)                 # (root)  functions.py:28
  %sum_1: i64[1, 1, 1] = sum.dim_IntList(%transpose, [-1])                      # (root)  functions.py:28
  %sort: (i32[1, 1, 1, 1], i64[1, 1, 1, 1]) = sort.stable(%transpose, stable=True, descending=True)  # (root)  functions.py:28
  %getitem_1: i64[1, 1, 1, 1] = %sort[1]                                        # (root)  functions.py:28
  %_to_copy: i32[1, 1, 1] = _to_copy(%sum_1, dtype=i32, memory_format=contiguous)  # (root)  functions.py:28
  %_to_copy_1: i32[1, 1, 1, 1] = _to_copy(%getitem_1, dtype=i32, memory_format=contiguous)  # (root)  functions.py:28
  %flex_attention: (f64[s0, s1, s2, 4], f64[s0, s1, s2], f64[s0, s1, s2]) = flex_attention(%batch, %batch, %batch, @0, [1, 1, %ones, %zeros, None, None, %_to_copy, %_to_copy_1, None, None, None, None, None, None, 1073741824, 1073741824, @1], 0.5, {BACKEND: 'AUTO', PRESCALE_QK: False, ROWS_GUARANTEED_SAFE: False, BLOCKS_ARE_CONTIGUOUS: False, WRITE_DQ: True, OUTPUT_LOGSUMEXP: False, OUTPUT_MAX: False}, [%slope], [])  # (root)  functions.py:28
  %getitem_2: f64[s0, s1, s2, 4] = %flex_attention[0]                           # (root)  functions.py:28
  %getitem_3: f64[s0, s1, s2] = %flex_attention[1]                              # (root)  functions.py:28
loss:
  %pow_1: f64[s0, s1, s2, 4] = pow.Tensor_Scalar(%getitem_2, 2)                 # functions.py:33
  %sum_2: f64[] = sum(%pow_1)                                                   # functions.py:33
  %full: i64[] = full([], %s0, dtype=i64, device=cpu, pin_memory=False)
  %_to_copy_2: f64[] = _to_copy(%denominator_loss, dtype=f64)
backward:
  %div_1: f64[] = div.Tensor(%loss_scale, %_to_copy_2)
  %expand_3: f64[s0, s1, s2, 4] = expand(%div_1, [%s0, %s1, %s2, 4])            # functions.py:33  of %sum_2
  %pow_2: f64[s0, s1, s2, 4] = pow.Tensor_Scalar(%getitem_2, 1.0)               # functions.py:33  of %pow_1
  %mul: f64[s0, s1, s2, 4] = mul.Scalar(%pow_2, 2.0)                            # functions.py:33  of %pow_1
  %mul_1: f64[s0, s1, s2, 4] = mul.Tensor(%expand_3, %mul)                      # functions.py:33  of %pow_1
  %flex_attention_backward: (f64[s0, s1, s2, 4], f64[s0, s1, s2, 4], f64[s0, s1, s2, 4], (f64[2])) = flex_attention_backward(%batch, %batch, %batch, %getitem_2, %getitem_3, %mul_1, None, @0, @2, [1, 1, %ones, %zeros, None, None, %_to_copy, %_to_copy_1, None, None, None, None, None, None, 1073741824, 1073741824, @1], 0.5, {BACKEND: 'AUTO', PRESCALE_QK: False, ROWS_GUARANTEED_SAFE: False, BLOCKS_ARE_CONTIGUOUS: False, WRITE_DQ: True, OUTPUT_LOGSUMEXP: False, OUTPUT_MAX: False}, [%slope], [])  # (root)  functions.py:28  of %flex_attention
  %getitem_8: (f64[2]) = %flex_attention_backward[3]                            # (root)  functions.py:28  of %flex_attention
  %flex_attention_backward_item: f64[2] = %getitem_8[0]                         # (root)  functions.py:28  of %flex_attention
return tokens loss = %full
return loss loss = %sum_2
return output output = %getitem_2
return grad slope = %flex_attention_backward_item
function @0(%arg0: f64[], %arg1: i32[], %arg2: i32[], %arg3: i32[], %arg4: i32[], %arg5: f64[2])
  %index: f64[] = index.Tensor(%arg5, [%arg2])
  %sub: i32[] = sub.Tensor(%arg3, %arg4)
  %abs: i32[] = abs(%sub)
  %pow: f32[] = pow.Tensor_Scalar(%abs, 2.0)
  %mul: f64[] = mul.Tensor(%index, %pow)
  %sub_1: f64[] = sub.Tensor(%arg0, %mul)
  return %sub_1
function @1(%arg0: i32[], %arg1: i32[], %arg2: i32[], %arg3: i32[])
  %new_ones: bool[] = new_ones(%arg0, [], dtype=bool, device=cpu, pin_memory=False)
  return %new_ones
function @2(%arg0: f64[], %arg1: i32[], %arg2: i32[], %arg3: i32[], %arg4: i32[], %arg5: f64[], %arg6: f64[2])
  %sub: i32[] = sub.Tensor(%arg3, %arg4)
  %abs: i32[] = abs(%sub)
  %pow: f32[] = pow.Tensor_Scalar(%abs, 2.0)
  %neg: f64[] = neg(%arg5)
  %mul: f64[] = mul.Tensor(%neg, %pow)
  %zeros_and_scatter: f64[2] = flex_lib.zeros_and_scatter([2], [%arg2], %mul)
  return [%arg5, None, None, None, None, %zeros_and_scatter]
""",
        )
