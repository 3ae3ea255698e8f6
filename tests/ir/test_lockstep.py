"""All ranks of an axis in one process: each collective as it is defined, lifetimes, and what is refused."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from graphcomp.compat import collective_operators as ops
from graphcomp.compat.symbols import new_fake_mode
from graphcomp.errors import VerifyError
from graphcomp.ir import interp
from graphcomp.ir.lockstep import lockstep
from graphcomp.ir.program import Level, Program
from graphcomp.ir.signature import BatchLeaf, Output, Size
from tests.ir.build import Builder, aten, training_step
from tests.ir.test_interp import inputs_of


def one_collective(shape: tuple[int, ...], target: Any, *rest: Any, dtype: torch.dtype = torch.float64) -> Program:
    """y = wait(target(x, ...)) + 1"""
    b = Builder()
    b.mode = new_fake_mode()
    with b.mode:
        x = b.input(BatchLeaf("x"), torch.empty(shape, dtype=dtype), "x")
    waited = b.call(ops.WAIT, b.call(target, x, *rest))
    return b.program({Output("y"): b.call(aten.add.Tensor, waited, 1)}, level=Level.STAGE)


def run(program: Program, *inputs: Tensor) -> list[Tensor]:
    return [result for (result,) in lockstep(program, "dp", [[tensor] for tensor in inputs])]


def given(ranks: int, *shape: int) -> list[Tensor]:
    return [torch.randn(shape, dtype=torch.float64) for _ in range(ranks)]


REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda parts: parts.sum(0),
    "avg": lambda parts: parts.mean(0),
    "max": lambda parts: parts.amax(0),
    "min": lambda parts: parts.amin(0),
    "product": lambda parts: parts.prod(0),
}


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("op", REDUCTIONS)
def test_all_reduce(op: str, ranks: int) -> None:
    inputs = given(ranks, 3, 2)
    expected = REDUCTIONS[op](torch.stack(inputs)) + 1
    results = run(one_collective((3, 2), ops.ALL_REDUCE, op, "dp"), *inputs)
    for result in results:
        torch.testing.assert_close(result, expected, rtol=1e-15, atol=1e-15)
        assert torch.equal(result, results[0])


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("op", REDUCTIONS)
def test_reduce_scatter(op: str, ranks: int) -> None:
    inputs = given(ranks, 2 * ranks, 3)
    expected = REDUCTIONS[op](torch.stack(inputs)) + 1
    results = run(one_collective((2 * ranks, 3), ops.REDUCE_SCATTER, op, ranks, "dp"), *inputs)
    assert [result.shape for result in results] == [(2, 3)] * ranks
    torch.testing.assert_close(torch.cat(results), expected, rtol=1e-15, atol=1e-15)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_all_gather(ranks: int) -> None:
    inputs = given(ranks, 2, 3)
    for result in run(one_collective((2, 3), ops.ALL_GATHER, ranks, "dp"), *inputs):
        assert torch.equal(result, torch.cat(inputs) + 1)


def test_broadcast() -> None:
    inputs = given(3, 2)
    for result in run(one_collective((2,), ops.BROADCAST, 2, "dp"), *inputs):
        assert torch.equal(result, inputs[2] + 1)


def test_all_to_all_with_splits_of_each_rank() -> None:
    """Sizes are inputs, so each rank has its own: rank 0 sends rows (1, 3), rank 1 sends rows (2, 0)."""
    b = Builder(example=(6, 8))
    x = b.input(BatchLeaf("x"), b.leaf, "x")
    inside = Builder("sizes", (2, 3, 4, 5))
    sizes = [b.input(Size(f"n{i}"), size, f"n{i}") for i, size in enumerate(inside.sizes)]
    target = b.graph.call_function(ops.ALL_TO_ALL, (x, sizes[:2], sizes[2:], "dp"))
    program = b.program({Output("y"): b.graph.call_function(ops.WAIT, (target,))}, level=Level.STAGE)
    first, second = torch.arange(8.0).view(4, 2), torch.arange(100.0, 104.0).view(2, 2)
    results = lockstep(program, "dp", [[first, 1, 2, 1, 3], [second, 3, 0, 2, 0]])
    assert torch.equal(results[0][0], torch.cat([first[:1], second]))
    assert torch.equal(results[1][0], first[1:])
    with pytest.raises(VerifyError, match="splits of rank 0 do not fit"):
        lockstep(program, "dp", [[first, 1, 1, 1, 3], [second, 3, 0, 2, 0]])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64])
def test_sums_are_taken_in_the_order_of_ranks_in_their_own_dtype(dtype: torch.dtype) -> None:
    inputs = [(torch.randn(50) * 9).to(dtype) for _ in range(3)]
    results = run(one_collective((50,), ops.ALL_REDUCE, "sum", "dp", dtype=dtype), *inputs)
    expected = (inputs[0] + inputs[1]) + inputs[2] + 1
    assert all(torch.equal(result, expected) and result.dtype == dtype for result in results)


def test_results_share_no_memory_with_inputs_or_each_other() -> None:
    b = Builder()
    with b.mode:
        x = b.input(BatchLeaf("x"), torch.empty(4), "x")
    calls = [b.call(ops.ALL_REDUCE, x, "sum", "dp"), b.call(ops.BROADCAST, x, 0, "dp")]
    calls += [b.call(ops.REDUCE_SCATTER, x, "sum", 2, "dp"), b.call(ops.ALL_GATHER, x, 2, "dp")]
    waits = [b.call(ops.WAIT, call) for call in calls]
    program = b.program({Output(str(i)): wait for i, wait in enumerate(waits)}, level=Level.STAGE)
    inputs = [torch.ones(4), torch.ones(4)]
    everything = [*inputs, *(t for results in lockstep(program, "dp", [[t] for t in inputs]) for t in results)]
    assert len({tensor.untyped_storage().data_ptr() for tensor in everything}) == len(everything)


def test_without_collectives_each_rank_runs_alone() -> None:
    program = training_step()
    each = [inputs_of(program, rows) for rows in (5, 7)]
    results = lockstep(program, "dp", [interp.ordered(program, inputs) for inputs in each])
    for inputs, found in zip(each, results, strict=True):
        for one, other in zip(interp.run(program, inputs).values(), found, strict=True):
            assert torch.equal(one, other)


def test_inputs_and_values_are_freed_after_their_last_use() -> None:
    b = Builder()
    with b.mode:
        x = b.input(BatchLeaf("x"), torch.empty(4), "x")
        y = b.input(BatchLeaf("y"), torch.empty(4), "y")
    summed = b.call(ops.WAIT, b.call(ops.ALL_REDUCE, x, "sum", "dp"))
    spy = b.call(aten.sin.default, summed)
    program = b.program({Output("z"): b.call(aten.add.Tensor, spy, y)}, level=Level.STAGE)
    boxes = [[torch.ones(4), torch.ones(4)] for _ in range(2)]
    references = [[weakref.ref(tensor) for tensor in box] for box in boxes]
    alive: list[list[bool]] = []

    def look(value: Tensor) -> Tensor:
        alive.append([reference() is not None for each in references for reference in each])
        return torch.sin(value)

    spy.target = look
    (first,), _ = lockstep(program, "dp", boxes)
    assert boxes == [[], []]
    assert alive == [[False, True, False, True]] * 2
    assert torch.equal(first, torch.sin(torch.full((4,), 2.0)) + 1)
    assert not any(reference() is not None for each in references for reference in each)


def refused(program: Program, inputs: Sequence[Tensor]) -> VerifyError:
    with pytest.raises(VerifyError) as caught:
        run(program, *inputs)
    return caught.value


def test_what_does_not_fit_together_is_refused() -> None:
    two = given(2, 4)
    error = refused(one_collective((4,), ops.ALL_REDUCE, "sum", "tp"), two)
    assert (error.what, error.expected, error.got) == ("a collective runs over another axis", "dp", "tp")
    assert error.where == "program 'sample', node 'all_reduce'"
    error = refused(one_collective((4,), ops.ALL_GATHER, 3, "dp"), two)
    assert (error.what, error.expected, error.got) == ("a collective counts another number of ranks", 2, 3)
    error = refused(one_collective((4,), ops.ALL_REDUCE, "sum", "dp"), [two[0], torch.ones(5)])
    assert error.what == "ranks 0 and 1 give a collective different tensors"
    assert (error.expected, error.got) == ("torch.float64 [4]", "torch.float32 [5]")
    error = refused(one_collective((3,), ops.REDUCE_SCATTER, "sum", 3, "dp"), given(3, 4))
    assert (error.what, error.got) == ("an input does not divide among the ranks", 4)
    for op, dtype in (("band", torch.int64), ("avg", torch.int64)):
        program = one_collective((4,), ops.ALL_REDUCE, op, "dp", dtype=dtype)
        error = refused(program, [torch.ones(4, dtype=dtype)] * 2)
        assert (error.what, error.got) == ("this reduction has no rule here", f"{op} of torch.int64")


def test_unknown_collectives_and_wrong_boxes_are_refused() -> None:
    program = one_collective((4,), ops.ALL_REDUCE, "sum", "dp")
    node = next(node for node in program.calls() if node.target is ops.ALL_REDUCE)
    node.target = torch.ops._c10d_functional.all_reduce_coalesced.default
    node.args = ([node.args[0]], "sum", "dp")
    assert refused(program, given(2, 4)).what == "this collective has no rule here"
    with pytest.raises(VerifyError, match="takes 1 inputs") as caught:
        lockstep(program, "dp", [[torch.ones(4)], []])
    assert caught.value.where == "rank 1 of axis 'dp'"
    with pytest.raises(VerifyError, match="has no rank to run on"):
        lockstep(program, "dp", [])
