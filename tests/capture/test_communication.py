"""Collectives of a captured model: functional, waited for once, named by axis or ranks; refused where none can meet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from expecttest import TestCase
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint

from graphcomp import collectives as gc
from graphcomp.capture import Joint, capture
from graphcomp.compiler import joint_passes
from graphcomp.errors import CaptureError, CollectiveError
from graphcomp.ir.collective_calls import axis_of, is_start, is_wait
from graphcomp.ir.digest import digest
from graphcomp.ir.printer import print_program
from graphcomp.ir.program import Program
from graphcomp.ir.verify import verify
from graphcomp.passes.decompose import Decompose
from graphcomp.passes.manager import PassManager
from tests.collectives.fake import fake_mesh

ops = torch.ops._c10d_functional


class Model(nn.Module):
    """One linear layer, then whatever a test does with its result."""

    def __init__(self, then: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 6)
        self.then = then

    def forward(self, x: Tensor) -> Tensor:
        return self.then(self.layer(x))


def squares(output: Tensor, batch: Any) -> Tensor:
    return output.square().mean()


def captured(then: Callable[[Tensor], Tensor], mesh: DeviceMesh | None = None) -> tuple[Program, Joint]:
    """The joint program after all passes."""
    joint = capture(Model(then), squares, (torch.ones(6, 4),), mesh=mesh)
    return PassManager(joint_passes(seeded=True)).run(joint.program), joint


def issued(program: Program) -> list[tuple[str, str]]:
    """The collectives in the order in which they are issued: name and ranks."""
    assert sum(map(is_start, program.calls())) == sum(map(is_wait, program.calls()))
    return [(str(n.target).split(".")[1], axis_of(n) or "") for n in program.calls() if is_start(n)]


class TestText(TestCase):
    maxDiff = None

    def test_program(self) -> None:
        """Every rank of the group prints the same, whichever it is."""
        texts = set()
        for rank in (0, 3):
            with fake_mesh(rank, dp=2, tp=2) as mesh:
                program, _ = captured(lambda h, mesh=mesh: gc.all_gather(h, mesh["tp"], dim=-1), mesh)  # type: ignore[misc]
                texts.add(print_program(program, notes=False))
        (text,) = texts
        self.assertExpectedInline(
            text,
            """\
joint program "joint"
  %layer_weight: f32[6, 4] = param layer.weight
  %layer_bias: f32[6] = param layer.bias
  %_0: f32[s0, 4] = batch [0]
  %denominator_loss: i64[] = denominator loss
  %loss_scale: f32[] = loss_scale
  %s0: int = size s0
  %t: f32[4, 6] = t(%layer_weight)
  %addmm: f32[s0, 6] = addmm(%layer_bias, %_0, %t)
  %all_gather_into_tensor: f32[2*s0, 6] = _c10d_functional.all_gather_into_tensor(%addmm, 2, tp)
  %wait_tensor: f32[2*s0, 6] = _c10d_functional.wait_tensor(%all_gather_into_tensor)
  %mul_9: int 2*s0 = 2 * %s0
  %view: f32[2, s0, 6] = view(%wait_tensor, [2, %s0, 6])
  %unbind: (f32[s0, 6], f32[s0, 6]) = unbind.int(%view)
  %getitem: f32[s0, 6] = %unbind[0]
  %getitem_1: f32[s0, 6] = %unbind[1]
  %cat: f32[s0, 12] = cat([%getitem, %getitem_1], 1)
  %pow_1: f32[s0, 12] = pow.Tensor_Scalar(%cat, 2)
  %mean: f32[] = mean(%pow_1)
  %_to_copy: f32[] = _to_copy(%denominator_loss, dtype=f32)
  %div_1: f32[] = div.Tensor(%loss_scale, %_to_copy)
  %expand: f32[s0, 12] = expand(%div_1, [%s0, 12])
  %mul_10: int 12*s0 = 12 * %s0
  %div_2: f32[s0, 12] = div.Scalar(%expand, %mul_10)
  %pow_2: f32[s0, 12] = pow.Tensor_Scalar(%cat, 1.0)
  %mul_1: f32[s0, 12] = mul.Scalar(%pow_2, 2.0)
  %mul_2: f32[s0, 12] = mul.Tensor(%div_2, %mul_1)
  %slice_1: f32[s0, 6] = slice.Tensor(%mul_2, 1, 0, 6)
  %slice_2: f32[s0, 6] = slice.Tensor(%mul_2, 1, 6, 12)
  %stack: f32[2, s0, 6] = stack([%slice_1, %slice_2])
  %view_1: f32[2*s0, 6] = view(%stack, [%mul_9, 6])
  %reduce_scatter_tensor: f32[s0, 6] = _c10d_functional.reduce_scatter_tensor(%view_1, 'sum', 2, tp)
  %wait_tensor_1: f32[s0, 6] = _c10d_functional.wait_tensor(%reduce_scatter_tensor)
  %t_1: f32[6, s0] = t(%wait_tensor_1)
  %mm: f32[6, 4] = mm(%t_1, %_0)
  %sum_1: f32[1, 6] = sum.dim_IntList(%wait_tensor_1, [0], True)
  %view_2: f32[6] = view(%sum_1, [6])
return loss loss = %mean
return output output = %cat
return grad layer.weight = %mm
return grad layer.bias = %view_2
""",
        )


def test_names() -> None:
    """Axes of the plan's mesh by name; other groups by their ranks, two of the same ranks apart."""

    def then(h: Tensor) -> Tensor:
        for group in (mesh["dp"], mesh.get_group("tp"), dist.group.WORLD, other, mesh["tp"], twin):
            h = gc.all_reduce(h, group)
        return h

    with fake_mesh(rank=2, dp=2, tp=2) as mesh:
        other, twin = dist.new_group([2, 0]), dist.new_group([0, 2])
        program, joint = captured(then, mesh)
        names = ["dp", "tp", "ranks(0-3)", "ranks(2,0)", "tp", "ranks(0,2)"]
        ranks = dist.get_process_group_ranks(other)
        names[3] = f"ranks({ranks[0]},{ranks[1]})"
        if ranks == [0, 2]:
            names[5] = "ranks(0,2)#2"
        assert [axis for _, axis in issued(program)] == names + names[::-1]
        assert joint.groups == {
            "dp": mesh.get_group("dp").group_name,
            "tp": mesh.get_group("tp").group_name,
            "ranks(0-3)": dist.group.WORLD.group_name,
            names[3]: other.group_name,
            names[5]: twin.group_name,
        }


def test_a_program_has_the_same_digest_whatever_its_groups_are_called() -> None:
    found = []
    for _ in range(2):
        with fake_mesh(dp=2, tp=2) as mesh:
            for _ in found:
                init_device_mesh("cpu", (4,))  # takes a serial number or more
                dist.new_group([0, 1])
            group = dist.new_group([0, 1])
            program, joint = captured(lambda h, g=group: gc.all_reduce(h, g), mesh)  # type: ignore[misc]
            found.append((digest(program), str(program), joint.groups["ranks(0,1)"]))
    (first, text, name), (second, other_text, other_name) = found
    assert (first, text) == (second, other_text)
    assert name != other_name


def test_an_unused_collective_is_kept() -> None:
    def then(h: Tensor) -> Tensor:
        gc.all_reduce(h.detach(), dist.group.WORLD, "max")
        return h

    with fake_mesh(dp=2):
        program, _ = captured(then)
        assert issued(program) == [("all_reduce", "ranks(0,1)")]


def test_equal_collectives_are_not_merged() -> None:
    with fake_mesh(dp=2) as mesh:
        program, _ = captured(lambda h: gc.all_reduce(h, mesh["dp"]) + gc.all_reduce(h, mesh["dp"]), mesh)
        assert issued(program) == [("all_reduce", "dp")] * 4


def test_a_checkpointed_collective_is_issued_once() -> None:
    """Forward, and its adjoint: what it gave is kept."""
    with fake_mesh(dp=2) as mesh:
        run = lambda x: gc.all_reduce(x.sin(), mesh).cos()  # noqa: E731
        program, _ = captured(lambda h: checkpoint(run, h, use_reentrant=False), mesh)
        assert issued(program) == [("all_reduce", "dp")] * 2


class Normed(nn.Module):
    """Batch norm writes its statistics, which functionalization replays the whole program to remove."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.norm, self.mesh = nn.BatchNorm1d(12), mesh

    def forward(self, h: Tensor) -> Tensor:
        gc.all_reduce(h.detach(), self.mesh, "max")
        return gc.reduce_scatter(self.norm(gc.all_gather(h, self.mesh, dim=1)), self.mesh, dim=1)


def test_collectives_outlive_passes_that_trace_again() -> None:
    with fake_mesh(dp=2) as mesh:
        program, _ = captured(Normed(mesh), mesh)
    decomposed = PassManager([Decompose("core")], given=["functional"]).run(program)
    names = ["all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor"]
    names += ["all_gather_into_tensor", "reduce_scatter_tensor"]
    assert issued(program) == issued(decomposed) == [(name, "dp") for name in names]


def test_splits_may_be_sizes() -> None:
    with fake_mesh(dp=2) as mesh:

        def then(h: Tensor) -> Tensor:
            rows = h.shape[0]
            return gc.all_to_all(h, mesh, [rows - 2, rows - 2], [rows - 2, 2])

        program, joint = captured(then, mesh)
    text = print_program(program, notes=False)
    assert "= _c10d_functional.all_to_all_single(%addmm, [%sub, %sub], [%sub, 2], dp)" in text
    assert "= _c10d_functional.all_to_all_single(%mul_1, [%sub, 2], [%sub, %sub], dp)" in text
    batch = {"[0]": torch.ones(9, 4)}
    assert joint.sizes.fit(batch) is not None


def unwaited(h: Tensor, group: str) -> Tensor:
    return ops.all_reduce(h.detach(), "sum", group) + h


def waited_twice(h: Tensor, group: str) -> Tensor:
    pending = ops.all_reduce(h.detach(), "sum", group)
    return ops.wait_tensor(pending) * ops.wait_tensor(pending) + h


def waited_and_read(h: Tensor, group: str) -> Tensor:
    pending = ops.all_reduce(h.detach(), "sum", group)
    return pending + ops.wait_tensor(ops.wait_tensor(pending)) + h


def waited_for_nothing(h: Tensor, group: str) -> Tensor:
    return ops.wait_tensor(ops.wait_tensor(ops.all_reduce(ops.wait_tensor(h), "sum", group)))


def several(h: Tensor, group: str) -> Tensor:
    first, _ = ops.all_reduce_coalesced([h.detach(), h.detach() * 2], "sum", group)
    return ops.wait_tensor(first) + h


@pytest.mark.parametrize("then", [unwaited, waited_twice, waited_and_read, waited_for_nothing, several])
def test_waits_are_repaired(then: Callable[[Tensor, str], Tensor]) -> None:
    with fake_mesh(dp=2) as mesh:
        joint = capture(Model(lambda h: then(h, mesh.get_group().group_name)), squares, (torch.ones(6, 4),), mesh=mesh)
        verify(joint.program)
        program, _ = captured(lambda h: then(h, mesh.get_group().group_name), mesh)
        waits = [node for node in program.calls() if is_wait(node)]
        assert len(waits) == sum(2 if then is several else 1 for node in program.calls() if is_start(node))


def test_torch_functional_collectives_are_captured_too() -> None:
    with fake_mesh(dp=2) as mesh:
        program, _ = captured(lambda h: functional.all_reduce(h, "sum", mesh["dp"]), mesh)
        assert issued(program) == [("all_reduce", "dp")] * 2


def in_place(h: Tensor) -> Tensor:
    total = h.detach().clone()
    dist.all_reduce(total)
    return h + total


def sent(h: Tensor) -> Tensor:
    return h + ops.wait_tensor(ops.isend(h.detach(), 1, 0, "0")).sum()


@pytest.mark.parametrize("then", [in_place, sent])
def test_other_communication_is_refused(then: Callable[[Tensor], Tensor]) -> None:
    with fake_mesh(dp=2), pytest.raises(CaptureError, match=r"communicates .* that a program cannot hold") as caught:
        captured(then)
    assert "test_communication.py" in str(caught.value.where)


def test_stages_do_not_meet() -> None:
    """A node runs on one stage: ranks of another would wait for it for ever."""
    with fake_mesh(rank=1, pp=2, tp=2) as mesh:
        for group in (mesh["pp"], dist.group.WORLD):
            with pytest.raises(CaptureError, match="ranks of different pipeline stages") as caught:
                captured(lambda h, g=group: gc.all_reduce(h, g), mesh)  # type: ignore[misc]
            assert caught.value.expected == "a group within the ranks of one stage, here [0, 1]"
        program, _ = captured(lambda h: gc.all_reduce(h, mesh["tp"]), mesh)
        assert issued(program) == [("all_reduce", "tp")] * 2


def test_a_reduction_without_gradient_is_refused_while_tracing() -> None:
    with fake_mesh(dp=2) as mesh, pytest.raises(CollectiveError, match="op='max' has no gradient") as caught:
        captured(lambda h: gc.all_reduce(h, mesh, "max"), mesh)
    assert "test_communication.py" in str(caught.value.where)


def test_a_size_that_does_not_divide_is_another_capture() -> None:
    """The program says for which sizes it holds."""
    with fake_mesh(dp=2) as mesh:
        _, joint = captured(lambda h: gc.reduce_scatter(h, mesh), mesh)
        batch = {"[0]": torch.ones(7, 4)}
        assert joint.sizes.fit(batch) is None
        batch = {"[0]": torch.ones(10, 4)}
        assert joint.sizes.fit(batch) is not None
        model = Model(lambda h: gc.reduce_scatter(h, mesh))
        with pytest.raises(CollectiveError, match="does not divide"):
            capture(model, squares, (torch.ones(7, 4),), mesh=mesh)
