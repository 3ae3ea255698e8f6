"""What passes must not change, over the zoo: results, contracts, places of nodes in the model."""

from __future__ import annotations

import pytest
import torch

from graphcomp.ir import meta
from graphcomp.ir.meta import Phase
from graphcomp.ir.printer import print_program
from graphcomp.ir.program import Program
from graphcomp.passes.base import Pass
from graphcomp.passes.cse import CommonSubexpressions
from graphcomp.passes.dead_code import DeadCode
from graphcomp.passes.decompose import Decompose
from graphcomp.passes.functionalize import Functionalize
from graphcomp.passes.manager import PassManager
from graphcomp.passes.noop import NoOp
from tests.passes.running import assert_same, sample
from tests.zoo import ZOO
from tests.zoo.case import Case

EACH = pytest.mark.parametrize("case", ZOO.values(), ids=ZOO)
CLEAN: list[Pass] = [Functionalize(), DeadCode(), NoOp(), CommonSubexpressions(), DeadCode()]


def check_places(program: Program) -> None:
    """Every backward node that has a differentiable operation finds its forward node."""
    calls = program.calls()
    forward = {meta.note(node).operation for node in calls if meta.note(node).phase is not Phase.BACKWARD}
    for node in calls:
        note = meta.note(node)
        assert note.operation is None or note.phase is not Phase.BACKWARD or note.operation in forward, node.name


@EACH
def test_clean_up_changes_no_bit(case: Case) -> None:
    joint, given = sample(case)
    functional = PassManager(CLEAN[:2]).run(joint.program)
    clean = PassManager(CLEAN).run(joint.program)
    check_places(clean)
    before, after = len(functional.calls()), len(clean.calls())
    assert after < before
    for each in given:
        assert_same(functional, clean, each)
    again = PassManager(CLEAN).run(clean)
    assert print_program(clean) == print_program(again), "a second clean-up finds more"


@pytest.mark.parametrize(
    ("name", "table"),
    [(name, "inductor") for name in ("mlp", "gpt", "batch_norm", "dropout", "half_frozen")]
    + [(name, "core") for name in ("mlp", "batch_norm")],
)
def test_decompositions_agree_to_rounding(name: str, table: str) -> None:
    """In fp64 the parts round differently in the last places, which sums carry on: 1e-12 of the largest."""
    joint, given = sample(ZOO[name], torch.float64)
    clean = PassManager(CLEAN).run(joint.program)
    decomposed = PassManager([Decompose(table), DeadCode()], given=["functional"]).run(clean)
    check_places(decomposed)
    assert [str(role) for role in decomposed.outputs] == [str(role) for role in clean.outputs]
    assert {node.target for node in decomposed.calls()} != {node.target for node in clean.calls()}
    for each in given:
        assert_same(clean, decomposed, each, rtol=1e-12)
