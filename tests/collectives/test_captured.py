"""A model that communicates, captured and compiled on real ranks: equal to the same model run eagerly."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from graphcomp import backend as backends
from graphcomp import collectives as gc
from graphcomp.capture import Joint, capture
from graphcomp.compiler import joint_passes
from graphcomp.ir.collective_calls import axis_of, is_start, is_wait
from graphcomp.ir.interp import ordered
from graphcomp.ir.printer import print_program
from graphcomp.ir.signature import BatchLeaf, Denominator, Grad, Loss, LossScale, Output, Param, Role, Size
from graphcomp.passes.manager import PassManager
from graphcomp.testing import run_ranks

MAXIMUM = 6
CAPACITY = 4


class Model(nn.Module):
    """Each collective once, over the axis of a mesh, its process group, or another group of the same ranks."""

    def __init__(self, mesh: DeviceMesh, other: dist.ProcessGroup) -> None:
        super().__init__()
        size = mesh.size()
        self.split = nn.Linear(4, 4)
        self.join = nn.Linear(4 * size, 2 * size)
        self.expert = nn.Linear(2, 2)
        self.scale = nn.Parameter(torch.ones(2))
        self.axis, self.group, self.other = mesh["tp"], mesh.get_group("tp"), other

    def forward(self, x: Tensor, counts: Tensor, splits: Tensor) -> tuple[Tensor, Tensor]:
        h = gc.all_gather(self.split(x), self.axis, dim=-1)
        h = h - gc.all_reduce(h.detach().amax(), self.group, op="max")
        h = gc.reduce_scatter(self.join(h), self.other, dim=1, op="avg")
        h = h * gc.broadcast(self.scale, self.axis, src=1)
        gc.all_reduce(h.detach().sum(), self.axis)  # nobody reads it
        rows = gc.all_gather_uneven(h[:3], self.axis, counts, MAXIMUM)
        sent = gc.all_to_all(h, self.axis, input_splits=splits, capacity=CAPACITY)
        back = gc.all_to_all(self.expert(sent.rows), self.axis, input_splits=sent.counts, capacity=CAPACITY)
        mixed = gc.all_to_all(rows, self.axis)
        total = back.rows.square().sum() + mixed.sin().sum()
        return gc.all_reduce(total, self.axis, "avg"), sent.overflow


def loss_fn(output: tuple[Tensor, Tensor], batch: Any) -> Tensor:
    return output[0]


def batch_of(rank: int, size: int, rows: int) -> dict[str, Tensor]:
    """Rows, how many of them each rank gives, and where this rank's go: zeros, and more than fit, among them."""
    generator = torch.Generator().manual_seed(10 * rank + rows)
    splits = torch.zeros(size, dtype=torch.int64)
    splits[(rank + 1) % size] = rows - 1
    splits[rank] += 1
    return {
        "x": torch.randn(rows, 4, generator=generator),
        "counts": torch.tensor([(r * rows) % 4 for r in range(size)]),
        "splits": splits,
    }


def eager(model: nn.Module, batch: dict[str, Tensor]) -> dict[Role, Tensor]:
    model.zero_grad()
    output = model(**batch)
    output[0].backward()
    found: dict[Role, Tensor] = {Loss("loss"): output[0].detach(), Output("[1]"): output[1]}
    return found | {Grad(name): p.grad for name, p in model.named_parameters() if p.grad is not None}


def inputs(joint: Joint, model: nn.Module, batch: dict[str, Tensor]) -> dict[Role, Any]:
    leaves = {path: batch[path] for path in joint.sizes.shapes}
    sizes = joint.sizes.fit(leaves)
    assert sizes is not None
    given: dict[Role, Any] = {Param(name): p.detach() for name, p in model.named_parameters()}
    given |= {BatchLeaf(path): leaf for path, leaf in batch.items()}
    given |= {Size(symbol): value for symbol, value in sizes.items()}
    return given | {Denominator("loss"): torch.ones((), dtype=torch.int64), LossScale(): torch.ones(())}


def one_rank(rank: int, size: int, backend: str) -> dict[str, Any]:
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
    model = Model(mesh, dist.new_group(list(range(size))))
    joint = capture(model, loss_fn, batch_of(rank, size, 5), mesh=mesh)
    program = PassManager(joint_passes(seeded=True)).run(joint.program)
    compiler = backends.get(backend)
    compiled = compiler.compile(program, joint.groups)
    differences, syncs = [], gc.host_syncs()
    for rows in (5, 7, 4, 5):
        batch = batch_of(rank, size, rows)
        found = dict(zip(program.outputs, compiled(ordered(program, inputs(joint, model, batch))), strict=True))
        for what, expected in eager(model, batch).items():
            differences.append((str(what), float((found[what] - expected).abs().max()), float(expected.abs().max())))
    calls = program.calls()
    return {
        "text": print_program(program, notes=False),
        "issued": [(str(n.target).split(".")[1], axis_of(n)) for n in calls if is_start(n)],
        "waits": sum(map(is_wait, calls)),
        "differences": differences,
        "programs": compiler.programs,
        "syncs": gc.host_syncs() - syncs,
    }


def check(found: list[dict[str, Any]], tolerance: float) -> None:
    assert len({one["text"] for one in found}) == 1  # the same on every rank
    for one in found:
        assert one["waits"] == len(one["issued"])
        assert {axis for _, axis in one["issued"]} == {"tp", f"ranks({'0,1' if len(found) == 2 else '0-2'})"}
        assert (one["programs"], one["syncs"]) == (1, 0)
        for what, difference, largest in one["differences"]:
            assert difference <= tolerance * max(largest, 1.0), (what, difference, largest)
        assert any(what == "output [1]" and largest > 0 for what, _, largest in one["differences"])


@pytest.mark.gloo
def test_the_eager_backend_is_bitwise_eager() -> None:
    found = run_ranks(one_rank, 3, 3, "eager")
    check(found, 0.0)
    forward = ["all_gather_into_tensor", "all_reduce", "reduce_scatter_tensor", "broadcast", "all_reduce"]
    assert [name for name, _ in found[0]["issued"]][:5] == forward


@pytest.mark.gloo
@pytest.mark.inductor
def test_inductor() -> None:
    check(run_ranks(one_rank, 2, 2, "inductor"), 1e-5)
