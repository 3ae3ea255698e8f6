"""What a step holds besides a rank's own rows, counted over its programs: parameters, accumulators, buffers."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import pytest
import torch
from torch.fx import Node

import graphcomp as gc
from graphcomp.compat.collective_operators import WAIT
from graphcomp.dataparallel.build import step_program
from graphcomp.dataparallel.programs import reduce_program, unshard_program
from graphcomp.dataparallel.spec import Shards, Spec
from graphcomp.dataparallel.step import DataParallel
from graphcomp.ir import meta
from graphcomp.ir.collective_calls import arguments, is_start
from graphcomp.ir.program import Program
from graphcomp.passes.memory import base_of
from graphcomp.runtime.program.instructions import BeginGradients, Free, RankProgram, Reduce, Run, Unshard
from graphcomp.testing.virtual import VirtualStep
from tests.dataparallel.running import spec
from tests.zoo import ZOO

RANKS = 2


def nbytes(node: Node) -> int:
    found = meta.tensor(node)
    return 0 if found is None else found.numel() * found.element_size()


def memory_of(node: Node) -> Node:
    """The node that has allocated what this one shows; inputs are dense, so `contiguous` copies nothing."""
    while True:
        same = node.target in (WAIT, torch.ops.aten.contiguous.default)
        base = node.args[0] if same else base_of(node)
        if not isinstance(base, Node):
            return node
        node = base


def held(program: Program) -> int:
    """The most bytes at once: inputs until they are read, what a collective is given until it is waited for."""
    last: dict[Node, int] = {}
    order = list(program.graph.nodes)
    for place, node in enumerate(order):
        reads = [*node.all_input_nodes, node]
        if node.target is WAIT:
            reads.append(arguments(node.args[0])["input"])
        last |= {memory_of(each): place for each in reads}
    most = now = 0
    live = {node for node in order if node.op == "placeholder"}
    now = sum(map(nbytes, live))
    for place, node in enumerate(order):
        if node.op == "call_function" and memory_of(node) is node:
            live.add(node)
            now += nbytes(node)
        most = max(most, now)
        for done in [each for each in live if last[each] <= place]:
            live.remove(done)
            now -= nbytes(done)
    return most


def step_programs(data: DataParallel, program: RankProgram) -> Iterator[Program]:
    for stage in program.stages:
        yield from (each for each in (data.unshard_program(stage), data.reduce_program(stage)) if each is not None)


def of_step(program: RankProgram, data: DataParallel) -> int:
    """The most bytes at once in a rank's step, but for its shards: whole parameters, accumulators, buffers."""
    parameters: dict[int, int] = {}
    sums: dict[int, int] = {}
    most = 0
    for step in program.instructions:
        beside = sum(parameters.values()) + sum(sums.values())
        match step:
            case Unshard(stage, _, results):
                gather = data.unshard_program(stage)
                assert gather is not None
                most = max(most, beside + held(gather) - sum(map(nbytes, gather.placeholders)))
                wholes = (whole(data.sharded[name]) for name in data.gathered_on(stage))
                parameters |= {place: size for place, size in zip(results, wholes, strict=True) if place is not None}
            case BeginGradients(slots, forms):
                sums |= {s: prod(f.shape) * f.dtype.itemsize for s, f in zip(slots, forms, strict=True)}
            case Reduce(stage, slots):
                assert not parameters  # all are dead when the first gradient is packed
                reduce = data.reduce_program(stage)
                assert reduce is not None
                given = sum(sums.pop(slot, 0) for slot in slots)
                most = max(most, beside - given + held(reduce))
                sums |= {
                    slot: nbytes(node) for slot, node in zip(slots, reduce.results, strict=True) if node is not None
                }
            case Run(frees=registers) | Free(registers):
                for register in registers:
                    parameters.pop(register, None)
        most = max(most, sum(parameters.values()) + sum(sums.values()))
    return most


def whole(of: Shards) -> int:
    """Bytes of all ranks' rows, padded."""
    return of.ranks * prod(of.padded) * of.spec.dtype.itemsize


@pytest.mark.parametrize("bucket", [512, 8192])
@pytest.mark.parametrize("options", [{}, {"regather": True}])
@pytest.mark.parametrize(("name", "stages"), [("tied_gpt", 1), ("tied_gpt", 2), ("gpt", 3)])
def test_a_sharded_step_needs_one_bucket_beside_parameters_and_gradients(
    name: str, stages: int, options: dict[str, bool], bucket: int
) -> None:
    case = ZOO[name]
    plan = gc.Plan(stages=stages, backend="eager", parameters="shard", bucket_bytes=bucket, quiet=True, **options)
    step = VirtualStep(case.build(0), case.loss_fn, plan=plan, data_ranks=RANKS)
    batches = case.microbatches(2 * RANKS, 3, torch.float32)
    prepared = step.bind([batches[:2], batches[2:]]).lines[0].prepared
    data = prepared.data
    assert data is not None
    for program in prepared.programs.ranks:
        kept = {name for stage in program.stages for name in data.gathered_on(stage)}
        parameters = sum(whole(data.sharded[name]) for name in kept)
        gradients = sum(data.gradient(name).numel * data.gradient(name).dtype.itemsize for _, name in program.gradients)
        starts = [node for each in step_programs(data, program) for node in each.calls() if is_start(node)]
        largest = max(nbytes(arguments(node)["input"]) + nbytes(node) for node in starts)
        found = of_step(program, data)
        assert found <= parameters + gradients + largest
        assert stages > 1 or found >= parameters + gradients  # else forward may be through with some of them


LARGE, SMALL = spec("large", 64, 32, dtype=torch.float32), spec("small", 64, dtype=torch.float32)


@pytest.mark.parametrize("ranks", [2, 4])
def test_large_parameters_are_communicated_where_they_lie(ranks: int) -> None:
    """Beside large gradients only their rows, and beside large shards only the whole: no packed copy of either."""
    large = [Spec(f"large{place}", LARGE.shape, LARGE.dtype, "cpu") for place in range(4)]
    rows = [Shards(each, ranks) for each in large]
    size = LARGE.numel * LARGE.dtype.itemsize
    reduce = step_program(reduce_program(0, [], rows, ranks), size)
    assert held(reduce) == 4 * size + 2 * size // ranks  # two are under way
    gather = step_program(unshard_program(0, rows), size)
    assert held(gather) <= 4 * size + 4 * size // ranks
    summed = step_program(reduce_program(0, large, [], ranks), size)
    assert not [node for node in summed.calls() if node.target is torch.ops.aten.cat.default]


def test_small_ones_around_a_large_one_are_joined() -> None:
    specs = [Spec("a", SMALL.shape, SMALL.dtype, "cpu"), LARGE, Spec("b", SMALL.shape, SMALL.dtype, "cpu")]
    program = step_program(reduce_program(0, [], [Shards(each, 2) for each in specs], 2), 4096)
    assert sorted(nbytes(arguments(node)["input"]) for node in program.calls() if is_start(node)) == [512, 8192]
