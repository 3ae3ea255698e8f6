"""Exact exchanges in captured programs: how they read, and what is refused of sizes known at run time only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from expecttest import TestCase
from torch import Tensor, nn

from graphcomp import collectives as gc
from graphcomp.capture import capture
from graphcomp.compiler import joint_passes
from graphcomp.errors import CaptureError
from graphcomp.ir.effects import reads_numbers
from graphcomp.ir.printer import print_program
from graphcomp.ir.program import Program
from graphcomp.ir.verify import verify
from graphcomp.passes.manager import PassManager
from tests.collectives.fake import fake_mesh

Then = Callable[[Tensor, Tensor, Any], Tensor]


class Model(nn.Module):
    """A linear layer, then whatever a test does with its result and the splits."""

    def __init__(self, then: Then, mesh: Any) -> None:
        super().__init__()
        self.layer, self.then, self.mesh = nn.Linear(2, 2, bias=False), then, mesh

    def forward(self, x: Tensor, splits: Tensor) -> Tensor:
        return self.then(self.layer(x), splits, self.mesh)


def captured(then: Then) -> Program:
    def loss_fn(output: Tensor, batch: Any) -> Tensor:
        return output.square().sum()

    with fake_mesh(dp=2) as mesh:
        batch = {"x": torch.ones(6, 2), "splits": torch.tensor([2, 4])}
        joint = capture(Model(then, mesh["dp"]), loss_fn, batch, mesh=mesh)
    program = PassManager(joint_passes(seeded=True)).run(joint.program)
    verify(program)
    return program


def there_and_back(h: Tensor, splits: Tensor, mesh: Any) -> Tensor:
    received = gc.all_to_all(splits, mesh)
    rows = gc.all_to_all(h, mesh, received, splits)
    return h + gc.all_to_all(rows.tanh(), mesh, splits, received)


class Texts(TestCase):
    def test_there_and_back(self) -> None:
        """One read; the rows that come back are as many as were sent."""
        program = captured(there_and_back)
        text = print_program(program, notes=False)
        short = text.replace("_c10d_functional.", "").replace("graphcomp.", "")
        self.assertExpectedInline(
            "\n".join(line.strip() for line in short.splitlines()),
            """\
joint program "joint"
%layer_weight: f32[2, 2] = param layer.weight
%x: f32[s0, 2] = batch x
%splits: i64[2] = batch splits
%denominator_loss: i64[] = denominator loss
%loss_scale: f32[] = loss_scale
%s0: int = size s0
%t: f32[2, 2] = t(%layer_weight)
%mm: f32[s0, 2] = mm(%x, %t)
%all_to_all_single: i64[2] = all_to_all_single(%splits, [1, 1], [1, 1], dp)
%wait_tensor: i64[2] = wait_tensor(%all_to_all_single)
%exchange_splits: (int u0, int u1, int s0 - u1, int u2, int u0 - u2) = exchange_splits(%splits, %wait_tensor, %s0)
%u1: int u1 = %exchange_splits[1]
%getitem_2: int s0 - u1 = %exchange_splits[2]
%u2: int u2 = %exchange_splits[3]
%getitem_4: int u0 - u2 = %exchange_splits[4]
%all_to_all_single_1: f32[u0, 2] = all_to_all_single(%mm, [%u2, %getitem_4], [%u1, %getitem_2], dp)
%wait_tensor_1: f32[u0, 2] = wait_tensor(%all_to_all_single_1)
%tanh: f32[u0, 2] = tanh(%wait_tensor_1)
%all_to_all_single_2: f32[s0, 2] = all_to_all_single(%tanh, [%u1, %getitem_2], [%u2, %getitem_4], dp)
%wait_tensor_2: f32[s0, 2] = wait_tensor(%all_to_all_single_2)
%add: f32[s0, 2] = add.Tensor(%mm, %wait_tensor_2)
%pow_1: f32[s0, 2] = pow.Tensor_Scalar(%add, 2)
%sum_1: f32[] = sum(%pow_1)
%_to_copy: f32[] = _to_copy(%denominator_loss, dtype=f32)
%div_1: f32[] = div.Tensor(%loss_scale, %_to_copy)
%expand: f32[s0, 2] = expand(%div_1, [%s0, 2])
%pow_2: f32[s0, 2] = pow.Tensor_Scalar(%add, 1.0)
%mul_2: f32[s0, 2] = mul.Scalar(%pow_2, 2.0)
%mul_3: f32[s0, 2] = mul.Tensor(%expand, %mul_2)
%all_to_all_single_3: f32[u0, 2] = all_to_all_single(%mul_3, [%u2, %getitem_4], [%u1, %getitem_2], dp)
%wait_tensor_3: f32[u0, 2] = wait_tensor(%all_to_all_single_3)
%tanh_backward: f32[u0, 2] = tanh_backward(%wait_tensor_3, %tanh)
%all_to_all_single_4: f32[s0, 2] = all_to_all_single(%tanh_backward, [%u1, %getitem_2], [%u2, %getitem_4], dp)
%wait_tensor_4: f32[s0, 2] = wait_tensor(%all_to_all_single_4)
%add_1: f32[s0, 2] = add.Tensor(%mul_3, %wait_tensor_4)
%t_1: f32[2, s0] = t(%add_1)
%mm_1: f32[2, 2] = mm(%t_1, %x)
return loss loss = %sum_1
return output output = %add
return grad layer.weight = %mm_1""",
        )
        assert text == print_program(captured(there_and_back), notes=False)


def reads(program: Program) -> int:
    return sum(map(reads_numbers, program.calls()))


def test_each_pair_of_splits_is_read_once() -> None:
    def twice(h: Tensor, splits: Tensor, mesh: Any) -> Tensor:
        received = gc.all_to_all(splits, mesh)
        first = gc.all_to_all(h, mesh, received, splits)
        second = gc.all_to_all(h * 2, mesh, received, splits)
        return gc.all_to_all(first * second, mesh, splits, received)

    assert reads(captured(twice)) == 1


def test_splits_of_any_integer_type_are_known() -> None:
    def narrow(h: Tensor, splits: Tensor, mesh: Any) -> Tensor:
        return there_and_back(h, splits.to(torch.int32), mesh)

    assert reads(captured(narrow)) == 1


def test_splits_that_are_written_to_are_read_again() -> None:
    def changed(h: Tensor, splits: Tensor, mesh: Any) -> Tensor:
        splits = splits.clone()
        first = gc.all_to_all(h, mesh, splits.flip(0), splits)
        splits.copy_(splits.flip(0))
        return torch.cat([first, gc.all_to_all(h, mesh, splits.flip(0), splits)])

    assert reads(captured(changed)) == 2


def test_counts_that_ranks_tell_each_other() -> None:
    """Nobody knows by then how many rows come back, so that these are of a size of their own."""

    def told(h: Tensor, splits: Tensor, mesh: Any) -> Tensor:
        return gc.all_to_all(h, mesh, input_splits=splits)

    assert reads(captured(told)) == 1


def test_what_fits_only_one_number_of_rows_is_checked_where_they_are_read() -> None:
    def meets_others(h: Tensor, splits: Tensor, mesh: Any) -> Tensor:
        return gc.all_to_all(h, mesh, splits.flip(0), splits) + h

    (call,) = filter(reads_numbers, captured(meets_others).calls())
    (sizes, relations) = call.args[3:]
    assert len(sizes) == 1
    assert str(relations).split("\t")[0] in ("n0 == s0", "s0 == n0") and "test_run_time_sizes.py:" in str(relations)


def branches(h: Tensor, splits: Tensor, mesh: Any) -> Tensor:
    rows = gc.all_to_all(h, mesh, splits, splits)
    return rows * 2 if rows.shape[0] > 3 else rows


def reduces(h: Tensor, splits: Tensor, mesh: Any) -> Tensor:
    return gc.all_reduce(gc.all_to_all(h, mesh, splits, splits), mesh)


def gathers(h: Tensor, splits: Tensor, mesh: Any) -> Tensor:
    return gc.all_gather(gc.all_to_all(h, mesh, splits, splits), mesh)


def sends_equal_runs(h: Tensor, splits: Tensor, mesh: Any) -> Tensor:
    return gc.all_to_all(gc.all_to_all(h, mesh, splits, splits), mesh)


def counts_in_python(h: Tensor, splits: Tensor, mesh: Any) -> Tensor:
    rows = gc.all_to_all(h, mesh, splits, splits)
    return rows / int(rows.shape[0])


def reads_a_number(h: Tensor, splits: Tensor, mesh: Any) -> Tensor:
    return h[: int(splits[0])]


@pytest.mark.parametrize(
    ("then", "what", "got"),
    [
        (branches, "decides on the contents", "a number that is known only when the program runs"),
        (counts_in_python, "decides on the contents", "a number that is known only when the program runs"),
        (sends_equal_runs, "decides on the contents", "a number that is known only when the program runs"),
        (reduces, "may differ between ranks", "all_reduce"),
        (gathers, "may differ between ranks", "all_gather"),
        (reads_a_number, "decides on the contents", "a number that is known only when the program runs"),
    ],
)
def test_refused(then: Then, what: str, got: str) -> None:
    with pytest.raises(CaptureError, match=what) as caught:
        captured(then)
    assert got in str(caught.value.got)
    lines = range(then.__code__.co_firstlineno + 1, then.__code__.co_firstlineno + 4)
    assert any(f"{__file__}:{line}" in str(caught.value.where) for line in lines)
