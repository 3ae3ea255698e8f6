"""The plain step programs: text, and what they compute on all data ranks, against torch on whole tensors."""

from __future__ import annotations

import pytest
import torch
from expecttest import TestCase

from graphcomp.dataparallel.programs import reduce_program, unshard_program
from graphcomp.dataparallel.spec import Shards, Spec
from graphcomp.errors import PlanError
from graphcomp.ir import meta
from graphcomp.ir.collective_calls import is_start
from graphcomp.ir.interp import boxed_callable
from graphcomp.ir.printer import print_program
from graphcomp.ir.program import Level
from graphcomp.ir.signature import Grad, Param, Shard
from graphcomp.ir.verify import verify
from tests.dataparallel.running import random, rows, run_all, sharded, spec, specs

RANKS = [1, 2, 3, 4]
AXIS = {"dp": "dp"}


class TestText(TestCase):
    maxDiff = None

    def test_unshard(self) -> None:
        program = unshard_program(1, [Shards(spec("fc.weight", 4, 3), 2), Shards(spec("fc.bias", 3), 2)])
        self.assertExpectedInline(
            print_program(program, groups=AXIS),
            """\
step program "stage 1 unshard"
  %shard_fc_weight: f64[2, 3] = shard fc.weight
  %shard_fc_bias: f64[2] = shard fc.bias
forward:
  %contiguous: f64[2, 3] = contiguous(%shard_fc_weight)                         # fc.weight
  %view: f64[6] = view(%contiguous, [6])                                        # fc.weight
  %all_gather_into_tensor: f64[12] = _c10d_functional.all_gather_into_tensor(%view, 2, dp)  # fc.weight
  %wait_tensor: f64[12] = _c10d_functional.wait_tensor(%all_gather_into_tensor)  # fc.weight
  %view_1: f64[4, 3] = view(%wait_tensor, [4, 3])                               # fc.weight
  %contiguous_1: f64[2] = contiguous(%shard_fc_bias)                            # fc.bias
  %view_2: f64[2] = view(%contiguous_1, [2])                                    # fc.bias
  %all_gather_into_tensor_1: f64[4] = _c10d_functional.all_gather_into_tensor(%view_2, 2, dp)  # fc.bias
  %wait_tensor_1: f64[4] = _c10d_functional.wait_tensor(%all_gather_into_tensor_1)  # fc.bias
  %slice_1: f64[3] = slice.Tensor(%wait_tensor_1, 0, 0, 3)                      # fc.bias
  %view_3: f64[3] = view(%slice_1, [3])                                         # fc.bias
return param fc.weight = %view_1
return param fc.bias = %view_3
""",
        )

    def test_reduce(self) -> None:
        program = reduce_program(0, [spec("scale")], [Shards(spec("fc.weight", 5, 3), 2)], 2)
        self.assertExpectedInline(
            print_program(program, groups=AXIS),
            """\
step program "stage 0 reduce"
  %grad_scale: f64[] = grad scale
  %grad_fc_weight: f64[5, 3] = grad fc.weight
backward:
  %contiguous: f64[] = contiguous(%grad_scale)                                  # scale
  %view: f64[1] = view(%contiguous, [1])                                        # scale
  %all_reduce: f64[1] = _c10d_functional.all_reduce(%view, 'sum', dp)           # scale
  %wait_tensor: f64[1] = _c10d_functional.wait_tensor(%all_reduce)              # scale
  %view_1: f64[] = view(%wait_tensor, [])                                       # scale
  %contiguous_1: f64[5, 3] = contiguous(%grad_fc_weight)                        # fc.weight
  %view_2: f64[15] = view(%contiguous_1, [15])                                  # fc.weight
  %constant_pad_nd: f64[18] = constant_pad_nd(%view_2, [0, 3], 0)               # fc.weight
  %reduce_scatter_tensor: f64[9] = _c10d_functional.reduce_scatter_tensor(%constant_pad_nd, 'sum', 2, dp)  # fc.weight
  %wait_tensor_1: f64[9] = _c10d_functional.wait_tensor(%reduce_scatter_tensor)  # fc.weight
  %view_3: f64[3, 3] = view(%wait_tensor_1, [3, 3])                             # fc.weight
return grad scale = %view_1
return grad fc.weight = %view_3
""",
        )


@pytest.mark.parametrize("ranks", RANKS)
def test_unshard_gives_back_what_was_split(ranks: int) -> None:
    of = sharded(ranks)
    program = unshard_program(0, of)
    assert (program.level, program.inputs) == (Level.STEP, tuple(Shard(each.name) for each in of))
    assert program.outputs == tuple(Param(each.name) for each in of)
    verify(program)
    whole = [random(each.spec) for each in of]
    shards = [[rows(w, each, rank) for w, each in zip(whole, of, strict=True)] for rank in range(ranks)]
    for results in run_all(program, shards):
        for result, w in zip(results, whole, strict=True):
            assert torch.equal(result, w) and result.is_contiguous()


@pytest.mark.parametrize("ranks", RANKS)
def test_reduce_sums_over_ranks(ranks: int) -> None:
    plain, of = [spec("scale"), *(spec(f"whole.{s.name}", *s.shape) for s in specs())], sharded(ranks)
    program = reduce_program(0, plain, of, ranks)
    everything = [*plain, *(each.spec for each in of)]
    assert program.inputs == program.outputs == tuple(Grad(each.name) for each in everything)
    verify(program)
    gradients = [[random(each) for each in everything] for _ in range(ranks)]
    for rank, results in enumerate(run_all(program, gradients)):
        for place, each in enumerate(everything):
            total = torch.stack([own[place] for own in gradients]).sum(0)
            expected = total if place < len(plain) else rows(total, of[place - len(plain)], rank)
            torch.testing.assert_close(results[place], expected, rtol=1e-14, atol=1e-14, msg=each.name)
            assert results[place].is_contiguous()


def test_inputs_may_have_any_strides() -> None:
    """Gradients have their parameter's strides, and a parameter may be a view."""
    of = [Shards(spec("tied.weight", 5, 3), 2), Shards(spec("column", 7), 2)]
    plain = [spec("whole", 4, 6), spec("line", 5)]
    strided = [torch.randn(6, 4).double().t(), torch.randn(5, 2).double()[:, 1]]
    strided += [torch.randn(3, 5).double().t(), torch.randn(7, 3).double()[:, 0]]
    assert not any(tensor.is_contiguous() for tensor in strided)
    results = run_all(reduce_program(0, plain, of, 2), [strided, strided])
    for rank in range(2):
        expected = [
            2 * strided[0],
            2 * strided[1],
            *(rows(2 * s, o, rank) for s, o in zip(strided[2:], of, strict=True)),
        ]
        for result, wanted in zip(results[rank], expected, strict=True):
            assert torch.equal(result, wanted) and result.is_contiguous()


def test_each_node_names_the_parameter_it_serves() -> None:
    program = reduce_program(0, [spec("a.scale")], sharded(3), 3)
    named = {meta.note(node).module for node in program.calls()}
    assert named == {role.name for role in program.outputs}  # type: ignore[attr-defined]


def test_devices_and_dtypes_are_those_of_the_specs() -> None:
    of = [Shards(Spec("w", (4, 2), torch.bfloat16, "cuda"), 2), Shards(Spec("v", (3,), torch.float32, "cpu"), 2)]
    program = unshard_program(0, of)
    found = [meta.tensor(node) for node in program.results]
    assert [(t.dtype, t.device.type) for t in found if t is not None] == [
        (torch.bfloat16, "cuda"),
        (torch.float32, "cpu"),
    ]


def test_names_of_parameters_need_not_be_names_in_python() -> None:
    """Such as those of `nn.Sequential`, and two that differ by a dot only."""
    plain = [spec(name, 2) for name in ("0.weight", "a.b", "a_b", "lambda", "x-y", "box", "self")]
    program = reduce_program(0, plain, [], 2)
    names = [node.name for node in program.placeholders]
    assert len(set(names)) == len(names) and all(map(str.isidentifier, names))
    for node in program.calls():  # one rank alone: the same code without any other
        if is_start(node):
            node.target, node.args = torch.ops.aten.clone.default, node.args[:1]
    given = [torch.full((2,), float(place)) for place in range(len(plain))]
    for one, other in zip(boxed_callable(program)([*given]), given, strict=True):
        assert torch.equal(one, other)


def test_nothing_to_do() -> None:
    assert run_all(unshard_program(0, []), [[], []]) == [(), ()]
    assert run_all(reduce_program(0, [], [], 2), [[], []]) == [(), ()]


def test_all_parameters_are_split_alike() -> None:
    of = [Shards(spec("a", 4), 2), Shards(spec("b", 4), 3)]
    with pytest.raises(PlanError, match="parameter 'b' is split over another number of data ranks"):
        unshard_program(0, of)
    with pytest.raises(PlanError, match="parameter 'a' is split over another number of data ranks"):
        reduce_program(0, [], of, 3)
