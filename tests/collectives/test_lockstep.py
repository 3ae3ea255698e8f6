"""What a traced collective computes on all ranks at once, without processes: results and gradients in fp64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from graphcomp.capture.communication import normalize_collectives
from graphcomp.compat.symbols import new_fake_mode
from graphcomp.compat.tracing import trace
from graphcomp.ir.collective_calls import is_start, is_wait
from graphcomp.ir.lockstep import lockstep
from graphcomp.ir.normalize import lift_sizes
from graphcomp.ir.printer import print_program
from graphcomp.ir.program import Level, Program
from graphcomp.ir.signature import BatchLeaf, Output
from graphcomp.ir.verify import verify
from tests.collectives.cases import CASES, Case, reference, weighted, weights
from tests.collectives.fake import fake_mesh


def traced(case: Case, rank: int, size: int) -> Program:
    """A program of one rank: its tensor, index tensor and loss weights in; result and gradient out."""

    def run(x: Tensor, numbers: Tensor, weight: Tensor, scale: Tensor) -> list[Tensor]:
        y = case.run(x, numbers, mesh, size)
        return [y, *torch.autograd.grad(weighted(y, weight, scale), [x])]

    with fake_mesh(rank, dp=size) as mesh:
        mode = new_fake_mode()
        x, numbers = case.inputs(rank, size)
        result = case.whole(*zip(*(case.inputs(r, size) for r in range(size)), strict=True))[rank]  # type: ignore[arg-type]
        given = (x.requires_grad_(), numbers, torch.zeros_like(result), torch.zeros((), dtype=x.dtype))
        with mode:
            module = trace(run, [mode.from_tensor(each, static_shapes=True) for each in given])
        graph = module.graph
        lift_sizes(graph, mode, {})
        normalize_collectives(graph, mesh)
        graph.output_node().args = (tuple(graph.output_node().args[0]),)  # type: ignore[arg-type]
        roles = [BatchLeaf(name) for name in ("x", "numbers", "weight", "scale")]
        program = Program(case.name, Level.JOINT, graph, tuple(roles), (Output("result"), Output("gradient")), mode)
    verify(program)
    return program


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("case", [case for case in CASES if case.one_text], ids=lambda case: case.name)
def test_gradients_are_those_of_the_global_function(case: Case, size: int) -> None:
    programs = [traced(case, rank, size) for rank in (0, size - 1)]
    assert len({print_program(program, notes=False) for program in programs}) == 1
    calls = programs[0].calls()
    assert sum(map(is_start, calls)) == sum(map(is_wait, calls)) > 0
    results, gradients = reference(case, size)
    boxes = []
    for rank in range(size):
        x, numbers = case.inputs(rank, size)
        boxes.append([x, numbers, *weights(results[rank], rank)])
    for rank, (result, gradient) in enumerate(lockstep(programs[0], "dp", boxes)):
        torch.testing.assert_close(result, results[rank], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(gradient, gradients[rank], rtol=1e-12, atol=1e-12)
