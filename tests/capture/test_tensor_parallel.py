"""Capture of models that are laid out over tensor ranks: programs of parts, with the collectives between them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import TestCase
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

import graphcomp as gc
from graphcomp.capture import capture
from graphcomp.capture.guards import ModelGuard
from graphcomp.compat.tensor_parallel import forget_meshes
from graphcomp.compiler import joint_passes
from graphcomp.errors import CaptureError, GraphcompError, LossError
from graphcomp.ir import signature as role
from graphcomp.ir.collective_calls import axis_of, is_start
from graphcomp.ir.printer import print_program
from graphcomp.ir.program import Program
from graphcomp.ir.sizes import evaluator
from graphcomp.passes.manager import PassManager
from graphcomp.testing import check_parity, run_virtual
from tests.collectives.fake import fake_mesh


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).tanh())


def squares(output: Tensor, batch: Any) -> Tensor:
    return output.square().mean()


def laid_out(mesh: DeviceMesh) -> nn.Module:
    return parallelize_module(MLP(), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def program_of(model: nn.Module, loss_fn: Callable[..., Any], batch: Any, mesh: DeviceMesh) -> Program:
    joint = capture(model, loss_fn, batch, mesh=mesh)
    return PassManager(joint_passes(seeded=True)).run(joint.program)


def issued(program: Program) -> list[tuple[str, str]]:
    return [(str(n.target).split(".")[1], axis_of(n) or "") for n in program.calls() if is_start(n)]


class TestText(TestCase):
    maxDiff = None

    def test_program(self) -> None:
        """Inputs are the parts of a rank; `parallelize_module` adds collectives; every rank prints the same."""
        texts = set()
        for rank in (0, 3):
            with fake_mesh(rank, dp=2, tp=2) as mesh:
                program = program_of(laid_out(mesh["tp"]), squares, torch.ones(6, 4), mesh)
                texts.add(print_program(program, notes=False))
        (text,) = texts
        self.assertExpectedInline(
            text,
            """\
joint program "joint"
  %up_weight: f32[3, 4] = param up.weight
  %up_bias: f32[3] = param up.bias
  %down_weight: f32[4, 3] = param down.weight
  %down_bias: f32[4] = param down.bias
  %batch: f32[s0, 4] = batch batch
  %denominator_loss: i64[] = denominator loss
  %loss_scale: f32[] = loss_scale
  %s0: int = size s0
  %t: f32[4, 3] = t(%up_weight)
  %addmm: f32[s0, 3] = addmm(%up_bias, %batch, %t)
  %tanh: f32[s0, 3] = tanh(%addmm)
  %t_1: f32[3, 4] = t(%down_weight)
  %div: f32[4] = div.Tensor(%down_bias, 2)
  %addmm_1: f32[s0, 4] = addmm(%div, %tanh, %t_1)
  %all_reduce: f32[s0, 4] = _c10d_functional.all_reduce(%addmm_1, 'sum', tp)
  %wait_tensor: f32[s0, 4] = _c10d_functional.wait_tensor(%all_reduce)
  %pow_1: f32[s0, 4] = pow.Tensor_Scalar(%wait_tensor, 2)
  %mean: f32[] = mean(%pow_1)
  %_to_copy: f32[] = _to_copy(%denominator_loss, dtype=f32)
  %div_2: f32[] = div.Tensor(%loss_scale, %_to_copy)
  %expand: f32[s0, 4] = expand(%div_2, [%s0, 4])
  %mul_112: int 4*s0 = 4 * %s0
  %div_3: f32[s0, 4] = div.Scalar(%expand, %mul_112)
  %pow_2: f32[s0, 4] = pow.Tensor_Scalar(%wait_tensor, 1.0)
  %mul_40: f32[s0, 4] = mul.Scalar(%pow_2, 2.0)
  %mul_41: f32[s0, 4] = mul.Tensor(%div_3, %mul_40)
  %mm: f32[s0, 3] = mm(%mul_41, %down_weight)
  %t_3: f32[4, s0] = t(%mul_41)
  %mm_1: f32[4, 3] = mm(%t_3, %tanh)
  %sum_1: f32[1, 4] = sum.dim_IntList(%mul_41, [0], True)
  %view_9: f32[4] = view(%sum_1, [4])
  %tanh_backward: f32[s0, 3] = tanh_backward(%mm, %tanh)
  %t_6: f32[3, s0] = t(%tanh_backward)
  %mm_2: f32[3, 4] = mm(%t_6, %batch)
  %sum_2: f32[1, 3] = sum.dim_IntList(%tanh_backward, [0], True)
  %view_11: f32[3] = view(%sum_2, [3])
return loss loss = %mean
return output output = %wait_tensor
return grad up.weight = %mm_2
return grad up.bias = %view_11
return grad down.weight = %mm_1
return grad down.bias = %view_9
""",
        )


class Logits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x)


def class_parallel(mesh: DeviceMesh, layout: Any) -> nn.Module:
    return parallelize_module(Logits(), mesh, {"head": ColwiseParallel(output_layouts=layout, use_local_output=False)})


def test_a_loss_over_parts_of_the_classes() -> None:
    """The same program whoever asks for it: `token_loss`, or user code that is in `loss_parallel` in forward only."""

    def token_loss(logits: Tensor, batch: Any) -> gc.TokenLoss:
        return gc.token_loss(logits, batch["labels"])

    def in_context(logits: Tensor, batch: Any) -> gc.TokenLoss:
        with loss_parallel():
            total = F.cross_entropy(logits, batch["labels"], reduction="sum")
        return gc.TokenLoss(total, (batch["labels"] != -100).sum())

    batch = {"x": torch.ones(6, 4), "labels": torch.zeros(6, dtype=torch.int64)}
    with fake_mesh(1, tp=2) as mesh:
        parts, whole = class_parallel(mesh["tp"], Shard(-1)), class_parallel(mesh["tp"], Replicate())
        found = [issued(program_of(parts, each, batch, mesh)) for each in (token_loss, in_context)]
        gathered = issued(program_of(whole, token_loss, batch, mesh))
    # The largest logit, the sum of exponentials, the logit of the label: nothing of the size of the classes.
    assert found[0] == found[1] == [("all_reduce", "tp")] * 3
    assert gathered == [("all_gather_into_tensor", "tp")]


def test_token_loss_has_no_options_over_parts_of_the_classes() -> None:
    with fake_mesh(tp=2) as mesh:
        logits = DTensor.from_local(torch.ones(3, 6), mesh["tp"], [Shard(1)], run_check=False)
        with pytest.raises(LossError, match="no options where the classes are laid out over tensor ranks") as caught:
            gc.token_loss(logits, torch.zeros(3, dtype=torch.int64), label_smoothing=0.1)
        assert caught.value.got == "label_smoothing"


def test_tools_that_need_the_whole_model_in_one_process() -> None:
    with fake_mesh(tp=2) as mesh:
        model = laid_out(mesh["tp"])
        for tool in (check_parity, run_virtual):
            with pytest.raises(GraphcompError) as caught:
                tool(model, squares, [torch.ones(2, 4)])
            assert "'up.weight'" in (caught.value.where or "")


def test_a_parameter_that_becomes_a_dtensor_is_noticed() -> None:
    with fake_mesh(tp=2) as mesh:
        model = MLP()
        guard = ModelGuard(model, squares)
        before = guard.key()
        whole = DTensor.from_local(torch.ones(4, 6), mesh["tp"], [Replicate()], run_check=False)
        model.down.weight = nn.Parameter(whole)
        assert guard.difference(before, guard.key()) == [
            "parameter 'down.weight' was a plain tensor and is (Replicate(),)",
        ]


class Dropped(MLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.dropout(self.up(x), 0.5))


@pytest.mark.filterwarnings("ignore:DTensor random operators")
@pytest.mark.parametrize("local", [True, False])
def test_tensor_ranks_draw_the_same_numbers(local: bool) -> None:
    """Also for parts: one program, character by character, and the seed is an input that they share."""
    texts = set()
    for rank in (0, 1):
        forget_meshes()
        with fake_mesh(rank, tp=2) as mesh:
            up = ColwiseParallel(use_local_output=local)
            model = parallelize_module(Dropped(), mesh["tp"], {"up": up, "down": RowwiseParallel()})
            program = program_of(model, squares, torch.ones(6, 4), mesh)
            assert role.Seed() in program.inputs
            texts.add(print_program(program))
    forget_meshes()
    (text,) = texts
    assert "f32[s0, 3]" in text


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(4), MLP()

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.mlp(x))


def over_sequence(mesh: DeviceMesh, local: bool) -> nn.Module:
    """local: layers hand plain tensors to each other."""
    down = RowwiseParallel(output_layouts=Shard(1), use_local_output=local)
    layers = {"norm": SequenceParallel(use_local_output=local), "mlp.up": ColwiseParallel(), "mlp.down": down}
    return parallelize_module(Normed(), mesh, layers)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("local", [False, True])
def test_lengths_that_do_not_divide(rank: int, local: bool) -> None:
    """One program for all of them: each rank computes its part of any. Numbers are compared in `tests/cases`."""
    forget_meshes()
    with fake_mesh(rank, tp=2) as mesh:
        joint = capture(over_sequence(mesh["tp"], local), squares, torch.ones(2, 5, 4), mesh=mesh)
        holds = evaluator(joint.sizes.conditions, list(joint.sizes.symbols))
        dimensions = [dimension for _, dimension in joint.sizes.symbols.values()]
        served = [n for n in range(2, 30) if all(holds(*((2, n, 4)[each] for each in dimensions)))]
        assert served == list(range(5, 30, 2))  # of three rows the second rank has one: a program of its own
        capture(over_sequence(mesh["tp"], local), squares, torch.ones(2, 1, 4), mesh=mesh)
    forget_meshes()


class Two(nn.Module):
    """Perceptrons whose inner sizes, over two ranks, have a part of three rows in common."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (
            nn.Sequential(nn.Linear(4, inner), nn.Tanh(), nn.Linear(inner, 4)) for inner in (7, 5)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


@pytest.mark.parametrize("rank", [0, 1])
def test_inner_sizes_that_do_not_divide(rank: int) -> None:
    forget_meshes()
    with fake_mesh(rank, tp=2) as mesh:
        model = Two()
        for name, local in (("first", True), ("second", False)):
            up = ColwiseParallel(use_local_output=local)
            parallelize_module(model, mesh["tp"], {f"{name}.0": up, f"{name}.2": RowwiseParallel()})
        capture(model, squares, torch.ones(6, 4), mesh=mesh)
        model = Two()
        for name in ("first", "second"):
            parallelize_module(model, mesh["tp"], {f"{name}.0": ColwiseParallel(), f"{name}.2": RowwiseParallel()})
        with pytest.raises(CaptureError, match="does not tell how large the whole is") as caught:
            capture(model, squares, torch.ones(6, 4), mesh=mesh)
    forget_meshes()
    assert caught.value.expected == "a part of 7 (4, 3), or of 5 (3, 2)"
    line = inspect.getsourcelines(Two.forward)[1] + 1
    assert caught.value.where == f"module 'second.2', {__file__}:{line}"


class Split(nn.Module):
    """Each rank splits its part of 15 columns into heads of 3."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 15)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x).unflatten(-1, (-1, 3))


@pytest.mark.parametrize("rank", [0, 1])
def test_heads_of_plain_parts_that_ranks_do_not_divide(rank: int) -> None:
    forget_meshes()
    with fake_mesh(rank, tp=2) as mesh:
        model = nn.Sequential(parallelize_module(Split(), mesh["tp"], {"up": ColwiseParallel()}))
        with pytest.raises(CaptureError, match="hand each other parts of tensors") as caught:
            capture(model, squares, torch.ones(2, 3, 4), mesh=mesh)
    forget_meshes()
    assert caught.value.expected == "code that goes with any tensor rank's part of 15 (8, 7)"
    assert caught.value.where == f"module '0', {__file__}:{inspect.getsourcelines(Split.forward)[1] + 1}"


class Heads(nn.Module):
    def __init__(self, form: Callable[[Any], Any]) -> None:
        super().__init__()
        self.up, self.form = nn.Linear(4, 15), form

    def forward(self, x: Tensor) -> Tensor:
        return self.form(self.up(x)).full_tensor()


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (lambda h: h.unflatten(-1, (3, 5)).transpose(1, 2), "Cannot unflatten unevenly sharded tensor"),
        (lambda h: h.transpose(1, 2).flatten(1, 2), "Cannot flatten unevenly sharded tensor"),
    ],
)
def test_heads_that_ranks_do_not_divide_are_refused(form: Callable[[Any], Any], text: str) -> None:
    forget_meshes()
    with fake_mesh(0, tp=2) as mesh:
        model = parallelize_module(Heads(form), mesh["tp"], {"up": ColwiseParallel(use_local_output=False)})
        with pytest.raises(RuntimeError, match=text) as caught:
            capture(model, squares, torch.ones(2, 3, 4), mesh=mesh)
    assert f"at {__file__}" in "".join(caught.value.__notes__)
    forget_meshes()
