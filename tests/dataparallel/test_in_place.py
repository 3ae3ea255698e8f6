"""Reductions overwrite their operand where nobody else reads it, and give the same sums."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from graphcomp.compat.collective_operators import ALL_REDUCE, ALL_REDUCE_IN_PLACE
from graphcomp.dataparallel.build import step_program
from graphcomp.dataparallel.in_place import reduce_in_place
from graphcomp.dataparallel.programs import reduce_program
from graphcomp.dataparallel.spec import Shards
from graphcomp.ir.interp import boxed_callable
from graphcomp.ir.lockstep import lockstep
from graphcomp.ir.program import Program
from graphcomp.testing import run_ranks
from tests.dataparallel.running import random, sharded, spec, specs

RANKS = 2


def built(bucket_bytes: int) -> Program:
    parts: list[Shards] = [each for each in sharded(RANKS) if each.name != "norm.weight"]
    whole = [spec("norm.weight", 8), spec("norm.bias", 8), spec("scale")]
    return step_program(reduce_program(0, whole, parts, RANKS), bucket_bytes)


def targets(program: Program) -> list[object]:
    return [node.target for node in program.graph.nodes]


@pytest.mark.parametrize("bucket_bytes", [1, 1 << 20])
def test_every_reduction_of_gradients_is_in_place(bucket_bytes: int) -> None:
    program = built(bucket_bytes)
    before = targets(program)
    found = targets(reduce_in_place(program))
    assert before.count(ALL_REDUCE) == found.count(ALL_REDUCE_IN_PLACE) > 0
    assert ALL_REDUCE not in found
    assert targets(program) == before


def test_a_value_that_is_read_again_is_left_alone() -> None:
    program = reduce_program(0, [spec("w", 4)], [], RANKS)
    start = next(node for node in program.graph.nodes if node.target is ALL_REDUCE)
    with program.graph.inserting_before(program.output_node):
        again = program.graph.call_function(torch.ops.aten.neg.default, (program.placeholders[0],))
    program.output_node.args = ((*program.output_node.args[0], again),)  # type: ignore[misc]
    assert ALL_REDUCE in targets(reduce_in_place(program))
    assert start.target is ALL_REDUCE


def inputs(rank: int) -> list[torch.Tensor]:
    torch.manual_seed(rank)
    return [random(spec("norm.weight", 8)), random(spec("norm.bias", 8)), random(spec("scale"))] + [
        random(one) for one in specs() if one.name != "norm.weight"
    ]


def reduced(rank: int, bucket_bytes: int) -> list[torch.Tensor]:
    name = dist.group.WORLD.group_name  # type: ignore[union-attr]
    return list(boxed_callable(reduce_in_place(built(bucket_bytes)), {"dp": name})(inputs(rank)))


@pytest.mark.gloo
def test_processes_come_to_the_sums_of_lockstep() -> None:
    found = run_ranks(reduced, RANKS, 64)
    expected = lockstep(built(64), "dp", [inputs(rank) for rank in range(RANKS)])
    for ours, theirs in zip(found, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
