"""Rows routed by their contents: exact exchanges in programs, whose sizes are known at run time only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import graphcomp as gc
from graphcomp.capture import Joint, capture
from graphcomp.compiler import joint_passes
from graphcomp.ir import signature as role
from graphcomp.ir.effects import reads_numbers
from graphcomp.ir.lockstep import lockstep
from graphcomp.ir.program import Program
from graphcomp.ir.signature import Role
from graphcomp.ir.verify import verify
from graphcomp.partition import Partitioned, partition
from graphcomp.passes.manager import PassManager
from graphcomp.testing import HostSyncs, run_ranks
from tests.cases.dropless import Dropless, Grouped, batch_of, build, reference, squares
from tests.collectives.fake import fake_mesh

Batches = Sequence[dict[str, Tensor]]
"""One a rank."""


def joint_of(size: int, batch: dict[str, Tensor], again: bool = False) -> Joint:
    with fake_mesh(dp=size) as mesh:
        joint = capture(build(mesh["dp"], size, again), squares, batch, mesh=mesh)
        return replace(joint, program=PassManager(joint_passes(seeded=True)).run(joint.program))


def inputs(joint: Joint, model: Dropless, batches: Batches) -> list[dict[Role, Any]]:
    rows = sum(batch["x"].shape[0] for batch in batches)
    found = []
    for batch in batches:
        sizes = joint.sizes.fit(batch)
        assert sizes is not None
        given: dict[Role, Any] = {role.Param(name): p.detach() for name, p in model.named_parameters()}
        given |= {role.BatchLeaf(path): leaf for path, leaf in batch.items()}
        given |= {role.Size(symbol): size for symbol, size in sizes.items()}
        given |= {role.Denominator("loss"): torch.tensor(rows), role.LossScale(): torch.ones((), dtype=torch.float64)}
        found.append(given)
    return found


def together(program: Program, given: Sequence[Mapping[Role, Any]]) -> list[dict[Role, Any]]:
    verify(program)
    boxes = [[one[what] for what in program.inputs] for one in given]
    return [dict(zip(program.outputs, found, strict=True)) for found in lockstep(program, "dp", boxes)]


def run_uncut(joint: Joint, batches: Batches) -> list[dict[Role, Any]]:
    return together(joint.program, inputs(joint, build(), batches))


def run_cut(cut: Partitioned, batches: Batches) -> list[dict[Role, Any]]:
    """All forwards, then all backwards; every stage on all ranks at once."""
    known = inputs(cut.joint, build(), batches)
    kept: list[list[dict[Role, Any]]] = []
    found: list[dict[Role, Any]] = [{} for _ in batches]

    def run(program: Program, saved: Sequence[dict[Role, Any]]) -> list[dict[Role, Any]]:
        given = [{**one, **more} for one, more in zip(known, saved, strict=True)]
        results = together(program, given)
        for one, own, result in zip(known, found, results, strict=True):
            one.update({what: value for what, value in result.items() if isinstance(what, role.Activation)})
            own.update({what: value for what, value in result.items() if isinstance(what, role.Grad | role.Loss)})
        return [{what: v for what, v in one.items() if isinstance(what, role.Saved)} for one in results]

    for stage in cut.stages:
        kept.append(run(stage.forward, [{} for _ in batches]))
    for stage in reversed(cut.stages):
        assert stage.backward is not None
        run(stage.backward, kept[stage.index])
    return found


def compare(found: Sequence[Mapping[Role, Any]], batches: Batches, tolerance: float = 1e-12) -> None:
    loss, gradients = reference(batches)
    rows = sum(batch["x"].shape[0] for batch in batches)
    total = sum(float(one[role.Loss("loss")]) for one in found) / rows
    assert total == pytest.approx(loss, abs=tolerance)
    for name, expected in gradients.items():
        summed = torch.stack([one[role.Grad(name)] for one in found]).sum(0)
        torch.testing.assert_close(summed, expected, rtol=tolerance, atol=tolerance)


def batches_of(rows: Sequence[int], experts: Sequence[int] | None = None) -> Batches:
    return [batch_of(rank, 0, own, experts) for rank, own in enumerate(rows)]


CASES = {
    "even": batches_of((6, 6)),
    "uneven": batches_of((3, 8)),
    "one rank receives nothing": batches_of((5, 7), experts=(3, 5)),
    "one rank receives one row": batches_of((2, 2), experts=(0, 1)),
}


@pytest.fixture(scope="module")
def joint() -> Joint:
    return joint_of(2, batch_of(0, 0, 6))


@pytest.mark.parametrize("batches", CASES.values(), ids=CASES)
def test_it_is_the_function_of_one_process(joint: Joint, batches: Batches) -> None:
    """One program for all lengths, and for all that the router decides."""
    compare(run_uncut(joint, batches), batches)


@pytest.mark.parametrize("rows", [0, 1])
def test_no_rows_and_one(rows: int) -> None:
    """Programs of their own, as for any size of 0 or 1."""
    batches = batches_of((rows, rows))
    joint = joint_of(2, batches[0])
    if rows:
        compare(run_uncut(joint, batches), batches)
    else:
        found = run_uncut(joint, batches)
        assert all(not value.any() for one in found for what, value in one.items() if isinstance(what, role.Grad))


def test_over_three_ranks() -> None:
    batches = batches_of((4, 9, 2), experts=(0, 1, 4))
    compare(run_uncut(joint_of(3, batches[0]), batches), batches)


@pytest.mark.parametrize("batches", CASES.values(), ids=CASES)
@pytest.mark.parametrize("split", [["experts"], ["last"], None], ids=str)
def test_a_stage_holds_all_of_it(joint: Joint, batches: Batches, split: list[str] | None) -> None:
    cut = partition(joint, 2, split)
    compare(run_cut(cut, batches), batches)


@pytest.mark.parametrize("batches", CASES.values(), ids=CASES)
def test_grouped_products(batches: Batches) -> None:
    """In single precision, which these kernels have."""
    with fake_mesh(dp=2) as mesh:
        model = build()
        model.experts = Grouped(mesh["dp"], 2)
        model.experts.load_state_dict(build().experts.state_dict())
        joint = capture(model.float(), squares, single(batches)[0], mesh=mesh)
        joint = replace(joint, program=PassManager(joint_passes(seeded=True)).run(joint.program))
    given = inputs(joint, model, single(batches))
    for one in given:
        one[role.LossScale()] = torch.ones(())
    found = together(joint.program, given)
    compare([{what: v.double() for what, v in one.items() if v is not None} for one in found], batches, 1e-5)


def single(batches: Batches) -> Batches:
    return [{name: leaf.float() for name, leaf in batch.items()} for batch in batches]


def test_a_checkpointed_region_reads_once() -> None:
    """Its experts are computed again from the rows that came, which are kept; nothing is sent or read again."""
    batches = CASES["uneven"]
    cut = partition(joint_of(2, batches[0], again=True), 2, ["last"])
    backward = cut.stages[0].backward
    assert backward is not None and "tanh_1_again" in str(backward)
    programs = [program for program in cut.programs if program.name.endswith("forward")]
    assert [sum(map(reads_numbers, program.calls())) for program in (*programs, backward)] == [1, 0, 0]
    compare(run_cut(cut, batches), batches)


ROWS = (3, 5)  # of the microbatches


def batches_for(data_rank: int) -> list[dict[str, Tensor]]:
    """The second microbatch sends nothing to the second rank."""
    chosen = (None, (0, 2))
    return [batch_of(data_rank, n, rows + data_rank, chosen[n]) for n, rows in enumerate(ROWS)]


def one_rank(rank: int, backend: str) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    plan = gc.Plan(mesh=mesh, backend=backend, quiet=True, deadline=60.0)
    step = gc.compile_train_step(build(mesh["dp"], 2), squares, plan=plan)
    batches = batches_for(mesh.get_local_rank("dp"))
    step(batches)
    step.model.zero_grad()
    with HostSyncs() as seen:
        result = step(batches)
    gradients = {name: p.grad.clone() for name, p in step.named_parameters() if p.grad is not None}
    return {
        "loss": result.loss.item(),
        "gradients": gradients,
        "traces": step.stats.traces,
        "syncs": step.stats.host_syncs,
        "seen": sorted(seen.found.values()),
        "owns": "experts.up" in gradients,
    }


@pytest.mark.gloo
def test_on_real_ranks() -> None:
    """Two stages, two data ranks: one host synchronisation a microbatch, where the experts are."""
    check_ranks(run_ranks(one_rank, 4, "eager"))


def check_ranks(found: list[dict[str, Any]]) -> None:
    loss, gradients = reference([batch for rank in (0, 1) for batch in batches_for(rank)])
    for one in found:
        assert one["loss"] == pytest.approx(loss, abs=1e-12)
        for name, gradient in one["gradients"].items():
            torch.testing.assert_close(gradient, gradients[name], rtol=1e-12, atol=1e-12)
        assert one["traces"] == 1
        assert one["syncs"] == (len(ROWS) if one["owns"] else 0)
        assert one["seen"] == ([len(ROWS)] if one["owns"] else [])
    assert {name for one in found for name in one["gradients"]} == set(gradients)


@pytest.mark.gloo
@pytest.mark.inductor
def test_compiled() -> None:
    check_ranks(run_ranks(one_rank, 4, "inductor"))
