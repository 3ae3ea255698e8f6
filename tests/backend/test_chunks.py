"""Chunks of head and loss wait for each other in the graph that is compiled, and compute the same."""

from __future__ import annotations

import torch
from torch.fx import GraphModule

from graphcomp.backend.chunks import in_turn
from graphcomp.ir import interp, meta
from tests.passes.running import inputs
from tests.passes.test_chunk_loss import batch, chunked, joint_of, plain

AFTER = torch.ops.graphcomp.after.default


def test_each_chunk_waits_for_what_the_one_before_it_gives() -> None:
    joint, model = joint_of(plain, (8,))
    program = chunked(joint.program, 3)
    given = inputs(joint, model, batch(7))
    expected = interp.run(program, given)
    in_turn(program.graph)
    waiting = [node for node in program.graph.nodes if node.target is AFTER]
    assert [meta.note(user).chunk for node in waiting for user in node.users] == [1, 2]
    for number, node in enumerate(waiting):
        waited = node.args[1]
        assert {meta.note(one).chunk for one in waited} == {number}
        # The sum of losses, the gradients of input, weight and bias.
        assert len(waited) == 4
    for what, value in interp.run(program, given).items():
        assert torch.equal(value, expected[what]), what


def test_a_program_without_chunks_stays_as_it_is() -> None:
    joint, _ = joint_of(plain, (8,))
    before = GraphModule(torch.nn.Module(), joint.program.graph).code
    in_turn(joint.program.graph)
    assert GraphModule(torch.nn.Module(), joint.program.graph).code == before
