"""Collectives of a model keep their waits beside them, wherever it is cut, and none is lost."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from graphcomp import collectives as gc
from graphcomp.capture import Joint, capture
from graphcomp.compiler import joint_passes
from graphcomp.ir.collective_calls import is_start, is_wait
from graphcomp.ir.verify import verify
from graphcomp.partition import partition
from graphcomp.partition.cuts import owned_forward
from graphcomp.partition.place import place
from graphcomp.partition.traits import replicable_nodes
from graphcomp.passes.manager import PassManager
from tests.collectives.fake import fake_mesh


class Model(nn.Module):
    """A collective between two layers, in no module of its own, and one that nobody reads."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.mesh = mesh

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        h = self.second(gc.all_reduce(h, self.mesh, "avg"))
        gc.all_reduce(h.detach(), self.mesh, "max")
        return self.third(gc.all_gather(h, self.mesh, dim=1)[:, :4])


def joint_of(mesh: DeviceMesh) -> Joint:
    def loss_fn(output: Tensor, batch: Any) -> Tensor:
        return output.square().mean()

    joint = capture(Model(mesh), loss_fn, (torch.ones(6, 4),), mesh=mesh)
    program = PassManager(joint_passes(seeded=True)).run(joint.program)
    return Joint(**{**vars(joint), "program": program})


def starts(nodes: Any) -> list[str]:
    return sorted(node.name for node in nodes if is_start(node))


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_every_collective_is_issued_once(stages: int) -> None:
    with fake_mesh(tp=2) as mesh:
        joint = joint_of(mesh)
    cut = partition(joint, stages)
    for program in cut.programs:
        verify(program)
    once = [program for stage in cut.stages for program in (stage.forward, stage.backward) if program is not None]
    apart = [node for program in once for node in program.calls()]
    assert starts(apart) == starts(joint.program.calls())
    assert len(starts(apart)) == 5


def test_a_wait_stays_with_its_collective() -> None:
    with fake_mesh(tp=2) as mesh:
        program = joint_of(mesh).program
    replicable = replicable_nodes(program)
    forward = owned_forward(program, replicable)
    for position in range(1, len(forward)):
        slots = place(program, [position], forward, replicable)
        for node in program.calls():
            if is_wait(node):
                assert slots[node] == slots[node.args[0]], (position, node.name)  # type: ignore[index]
