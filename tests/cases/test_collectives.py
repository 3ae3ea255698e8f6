"""Cases C20 and C22: what every rank issues, and the gradients of small functions of all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphcomp import collectives as gc
from graphcomp.capture import capture
from graphcomp.compiler import joint_passes
from graphcomp.ir.collective_calls import is_start, is_wait
from graphcomp.ir.interp import ordered
from graphcomp.ir.lockstep import lockstep
from graphcomp.ir.program import Program
from graphcomp.ir.signature import BatchLeaf, Denominator, Grad, LossScale, Param
from graphcomp.passes.manager import PassManager
from tests.collectives.fake import fake_mesh

Run = Callable[[Tensor, Any], Tensor]


class Model(nn.Module):
    """A function of one parameter of four values, run over the ranks of a mesh."""

    def __init__(self, run: Run, mesh: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.run, self.mesh = run, mesh

    def forward(self, factor: Tensor) -> Tensor:
        return self.run(self.weight, self.mesh) * factor


def program_of(run: Run, rank: int) -> Program:
    def loss_fn(output: Tensor, batch: Any) -> Tensor:
        return output.sum()

    with fake_mesh(rank, dp=2) as mesh:
        joint = capture(Model(run, mesh), loss_fn, {"factor": torch.tensor(1.0)}, mesh=mesh)
        return PassManager(joint_passes(seeded=True)).run(joint.program)


def test_c20_both_ranks_issue_the_same_list() -> None:
    """Only rank 0 uses the result, but rank 1 has to take part."""
    lists = []
    for rank in (0, 1):

        def run(weight: Tensor, mesh: Any, rank: int = rank) -> Tensor:
            total = gc.all_reduce(weight.detach(), mesh)
            return weight * total if rank == 0 else weight

        calls = program_of(run, rank).calls()
        waits = [node.args[0] for node in calls if is_wait(node)]
        starts = [node for node in calls if is_start(node)]
        assert waits == starts
        lists.append([(node.target, node.args[1:]) for node in starts])
    assert lists[0] == lists[1]
    assert len(lists[0]) == 1


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        (gc.all_reduce, [3.0, 3.0, 3.0, 3.0]),
        (gc.reduce_scatter, [1.0, 1.0, 2.0, 2.0]),
        (lambda x, mesh: gc.all_reduce(x, mesh, "avg"), [1.5, 1.5, 1.5, 1.5]),
        (lambda x, mesh: gc.reduce_scatter(x, mesh, op="avg"), [0.5, 0.5, 1.0, 1.0]),
    ],
    ids=["all_reduce", "reduce_scatter", "all_reduce avg", "reduce_scatter avg"],
)
def test_c22_gradients_of_the_sum_over_ranks(run: Run, expected: list[float]) -> None:
    """x -> a collective -> times (rank + 1) -> sum over ranks."""
    program = program_of(run, 0)
    one = torch.ones((), dtype=torch.int64)
    boxes = [
        ordered(
            program,
            {
                Param("weight"): torch.ones(4),
                BatchLeaf("factor"): torch.tensor(rank + 1.0),
                Denominator("loss"): one,
                LossScale(): torch.ones(()),
            },
        )
        for rank in (0, 1)
    ]
    place = program.outputs.index(Grad("weight"))
    for results in lockstep(program, "dp", boxes):
        assert results[place].tolist() == expected
