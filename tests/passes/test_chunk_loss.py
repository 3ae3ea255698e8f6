"""Head and loss in chunks: the program's text, its results, and what is refused by name."""

# ruff: noqa: E501 (programs as they print)

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import TestCase
from torch import Tensor, nn

from graphcomp.capture.capture import capture
from graphcomp.capture.joint import Joint
from graphcomp.compat.symbols import guard_count
from graphcomp.compiler import joint_passes
from graphcomp.errors import CaptureError, PlanError
from graphcomp.ir.meta import note
from graphcomp.ir.normalize import number_names
from graphcomp.ir.printer import print_program
from graphcomp.ir.program import Program
from graphcomp.ir.signature import Output
from graphcomp.losses import TokenLoss, metric, token_loss
from graphcomp.passes.chunk_loss import ChunkLoss
from graphcomp.passes.dead_code import DeadCode
from graphcomp.passes.manager import PassManager
from tests.passes.running import assert_same, inputs


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(3, 4), nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def batch(*shape: int, seed: int = 0) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    labels = torch.randint(6, shape, generator=draw)
    return {"x": torch.randn(*shape, 3, generator=draw).double(), "labels": labels.masked_fill(labels == 5, -100)}


def joint_of(loss_fn: Callable[[Any, Any], Any], shape: tuple[int, ...]) -> tuple[Joint, nn.Module]:
    """The joint program, cleaned up, without the model's outputs."""
    model = Head().double()
    joint = capture(model, loss_fn, batch(*shape))
    program = PassManager(joint_passes(seeded=False)).run(joint.program)
    kept = [(what, node) for what, node in program.output_items() if not isinstance(what, Output)]
    program.output_node.args = (tuple(node for _, node in kept),)
    program.set_signature(program.inputs, [what for what, _ in kept])
    return replace(joint, program=DeadCode().apply(program)), model


def chunked(program: Program, chunks: int) -> Program:
    return PassManager([ChunkLoss(chunks), DeadCode()]).run(program)


def plain(logits: Tensor, given: dict[str, Tensor]) -> TokenLoss:
    return token_loss(logits, given["labels"])


def shifted(logits: Tensor, given: dict[str, Tensor]) -> TokenLoss:
    return token_loss(logits[:, :-1], given["labels"][:, 1:])


class TestText(TestCase):
    maxDiff = None

    def test_the_parts_stand_one_behind_the_other(self) -> None:
        program = chunked(joint_of(plain, (8,))[0].program, 2)
        number_names(program.graph)
        self.assertExpectedInline(
            print_program(program, notes=False),
            """\
joint program "joint"
  %body_weight: f64[4, 3] = param body.weight
  %body_bias: f64[4] = param body.bias
  %head_weight: f64[6, 4] = param head.weight
  %head_bias: f64[6] = param head.bias
  %x: f64[s0, 3] = batch x
  %labels: i64[s0] = batch labels
  %denominator_loss: i64[] = denominator loss
  %loss_scale: f64[] = loss_scale
  %s0: int = size s0
  %t: f64[3, 4] = t(%body_weight)
  %addmm: f64[s0, 4] = addmm(%body_bias, %x, %t)
  %t_1: f64[4, 6] = t(%head_weight)
  %ne: bool[s0] = ne.Scalar(%labels, -100)
  %sum: i64[] = sum(%ne)
  %_to_copy: f64[] = _to_copy(%denominator_loss, dtype=f64)
  %div: f64[] = div.Tensor(%loss_scale, %_to_copy)
  %floordiv: int (s0//2) = %s0 // 2
  %addmm_1: f64[(s0//2), 4] = slice.Tensor(%addmm, 0, 0, %floordiv)
  %addmm_2: f64[(s0//2), 6] = addmm(%head_bias, %addmm_1, %t_1)
  %_log_softmax: f64[(s0//2), 6] = _log_softmax(%addmm_2, 1, False)
  %labels_1: i64[(s0//2)] = slice.Tensor(%labels, 0, 0, %floordiv)
  %nll_loss_forward: (f64[], f64[]) = nll_loss_forward(%_log_softmax, %labels_1, None, 2, -100)
  %getitem: f64[] = %nll_loss_forward[0]
  %getitem_1: f64[] = %nll_loss_forward[1]
  %nll_loss_backward: f64[(s0//2), 6] = nll_loss_backward(%div, %_log_softmax, %labels_1, None, 2, -100, %getitem_1)
  %_log_softmax_backward_data: f64[(s0//2), 6] = _log_softmax_backward_data(%nll_loss_backward, %_log_softmax, 1, f64)
  %mm: f64[(s0//2), 4] = mm(%_log_softmax_backward_data, %head_weight)
  %t_2: f64[6, (s0//2)] = t(%_log_softmax_backward_data)
  %mm_1: f64[6, 4] = mm(%t_2, %addmm_1)
  %sum_1: f64[1, 6] = sum.dim_IntList(%_log_softmax_backward_data, [0], True)
  %addmm_3: f64[s0 - ((s0//2)), 4] = slice.Tensor(%addmm, 0, %floordiv, %s0)
  %addmm_4: f64[s0 - ((s0//2)), 6] = addmm(%head_bias, %addmm_3, %t_1)
  %_log_softmax_1: f64[s0 - ((s0//2)), 6] = _log_softmax(%addmm_4, 1, False)
  %labels_2: i64[s0 - ((s0//2))] = slice.Tensor(%labels, 0, %floordiv, %s0)
  %nll_loss_forward_1: (f64[], f64[]) = nll_loss_forward(%_log_softmax_1, %labels_2, None, 2, -100)
  %getitem_2: f64[] = %nll_loss_forward_1[0]
  %getitem_sum: f64[] = add.Tensor(%getitem, %getitem_2)
  %getitem_3: f64[] = %nll_loss_forward_1[1]
  %nll_loss_backward_1: f64[s0 - ((s0//2)), 6] = nll_loss_backward(%div, %_log_softmax_1, %labels_2, None, 2, -100, %getitem_3)
  %_log_softmax_backward_data_1: f64[s0 - ((s0//2)), 6] = _log_softmax_backward_data(%nll_loss_backward_1, %_log_softmax_1, 1, f64)
  %mm_2: f64[s0 - ((s0//2)), 4] = mm(%_log_softmax_backward_data_1, %head_weight)
  %t_3: f64[6, s0 - ((s0//2))] = t(%_log_softmax_backward_data_1)
  %mm_3: f64[6, 4] = addmm(%mm_1, %t_3, %addmm_3)
  %sum_2: f64[1, 6] = sum.dim_IntList(%_log_softmax_backward_data_1, [0], True)
  %sum_2_sum: f64[1, 6] = add.Tensor(%sum_1, %sum_2)
  %mm_4: f64[s0, 4] = cat([%mm, %mm_2])
  %view: f64[6] = view(%sum_2_sum, [6])
  %t_4: f64[4, s0] = t(%mm_4)
  %mm_5: f64[4, 3] = mm(%t_4, %x)
  %sum_3: f64[1, 4] = sum.dim_IntList(%mm_4, [0], True)
  %view_1: f64[4] = view(%sum_3, [4])
return tokens loss = %sum
return loss loss = %getitem_sum
return grad body.weight = %mm_5
return grad body.bias = %view_1
return grad head.weight = %mm_3
return grad head.bias = %view
""",
        )

    def test_rows_that_the_loss_leaves_out_are_left_out_before_the_product(self) -> None:
        program = chunked(joint_of(shifted, (4, 6))[0].program, 2)
        number_names(program.graph)
        lines = print_program(program, notes=False).splitlines()
        self.assertExpectedInline(
            "\n".join(line for line in lines if "slice" in line or "cat(" in line or "%clone" in line),
            """\
  %slice: i64[s0, s1 - 1] = slice.Tensor(%labels, 1, 1, 9223372036854775807)
  %clone: i64[s0, s1 - 1] = clone(%slice, memory_format=contiguous)
  %_unsafe_view: i64[s0*(s1 - 1)] = _unsafe_view(%clone, [%mul_1])
  %ne: bool[s0, s1 - 1] = ne.Scalar(%slice, -100)
  %addmm_2: f64[s0, s1 - 1, 4] = slice.Tensor(%addmm_1, 1, 0, -1, 1)
  %addmm_5: f64[((s0*(s1 - 1))//2), 4] = slice.Tensor(%addmm_4, 0, 0, %floordiv)
  %_unsafe_view_1: i64[((s0*(s1 - 1))//2)] = slice.Tensor(%_unsafe_view, 0, 0, %floordiv)
  %addmm_7: f64[s0*(s1 - 1) - (((s0*(s1 - 1))//2)), 4] = slice.Tensor(%addmm_4, 0, %floordiv, %mul_2)
  %_unsafe_view_2: i64[s0*(s1 - 1) - (((s0*(s1 - 1))//2))] = slice.Tensor(%_unsafe_view, 0, %floordiv, %mul_2)
  %mm_4: f64[s0*(s1 - 1), 4] = cat([%mm, %mm_2])
  %mm_6: f64[s0, s1, 4] = slice_backward(%mm_5, [%s0, %s1, 4], 1, 0, -1, 1)""",
        )


def smoothed(logits: Tensor, given: dict[str, Tensor]) -> TokenLoss:
    return token_loss(logits, given["labels"], label_smoothing=0.1, weight=torch.arange(1, 7).double())


def capped(logits: Tensor, given: dict[str, Tensor]) -> TokenLoss:
    return shifted(3 * torch.tanh(logits / 3), given)


def several(logits: Tensor, given: dict[str, Tensor]) -> tuple[dict, dict]:
    labels = given["labels"]
    valid = labels != -100
    sizes = {"z": TokenLoss((logits.logsumexp(-1).square() * valid).sum(), valid)}
    right = (logits.argmax(-1) == labels).sum()
    top = logits.topk(2)[1].eq(labels.unsqueeze(-1)).any(-1).sum()
    return {"lm": token_loss(logits, labels), **sizes}, {"right": metric(right, "sum"), "top": metric(top, "sum")}


def by_hand(logits: Tensor, given: dict[str, Tensor]) -> TokenLoss:
    """Log-probabilities picked by a mask of classes, in three dimensions, with a mean of each row's classes."""
    labels = given["labels"]
    chosen = labels.unsqueeze(-1) == torch.arange(6)
    logs = torch.softmax(logits, -1).clamp(min=1e-9).log() - 0.01 * logits.mean(-1, keepdim=True)
    return TokenLoss(-(logs * chosen).sum(), labels != -100)


def unreduced(logits: Tensor, given: dict[str, Tensor]) -> TokenLoss:
    """A focal loss, weighted by position, of some of the classes."""
    labels = given["labels"].clamp(max=4)
    each = F.cross_entropy(logits[..., :5].flatten(0, 1), labels.flatten(), reduction="none")
    focal = (each * (1 - (-each).exp()).square()).view(labels.shape)
    return TokenLoss((focal * torch.arange(1, logits.shape[1] + 1)).sum(), labels != -100)


LOSSES = [unreduced, plain, shifted, smoothed, capped, several, by_hand]


@pytest.mark.parametrize("loss_fn", LOSSES)
@pytest.mark.parametrize("chunks", [1, 3, 8])
def test_meaning(loss_fn: Callable[[Any, Any], Any], chunks: int) -> None:
    """Sums are taken in another order: 1e-13 of the largest. Fewer rows than chunks leave some chunks empty."""
    joint, model = joint_of(loss_fn, (4, 6))
    guards = guard_count(joint.program.fake_mode)
    other = chunked(joint.program, chunks)
    assert guard_count(joint.program.fake_mode) == guards, "a condition on sizes was added"
    for shape in ((4, 6), (2, 3), (5, 7)):
        assert_same(joint.program, other, inputs(joint, model, batch(*shape, seed=1)), rtol=1e-13)
    assert {note(node).chunk for node in other.calls()} - {None} == (set(range(chunks)) if chunks > 1 else set())


def mean(logits: Tensor, given: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), given["labels"].flatten())


def mixed(logits: Tensor, given: dict[str, Tensor]) -> TokenLoss:
    return token_loss(logits - logits.cumsum(0), given["labels"])


def largest(logits: Tensor, given: dict[str, Tensor]) -> tuple[TokenLoss, dict]:
    return plain(logits, given), {"largest": metric(logits.max(), "max")}


def nonlinear(logits: Tensor, given: dict[str, Tensor]) -> TokenLoss:
    return TokenLoss(logits.exp().sum().log(), 1)


def two_selections(logits: Tensor, given: dict[str, Tensor]) -> tuple[TokenLoss, dict]:
    return shifted(logits, given), {"sum": metric(logits.sum(), "sum")}


def other_rows(logits: Tensor, given: dict[str, Tensor]) -> TokenLoss:
    return TokenLoss(logits.gather(-1, given["labels"].clamp(min=0).unsqueeze(-1)).sum(), 1)


@pytest.mark.parametrize(
    ("loss_fn", "operation", "reason"),
    [
        (mean, "aten.nll_loss_forward.default", "it is a mean: it divides by the number of all labels"),
        (mixed, "aten.cumsum.default", "it works along the rows, or over all of them"),
        (largest, "aten.max.default", "it is not known to treat rows one by one"),
        (nonlinear, "aten.mul.Tensor", "it also needs"),
        (two_selections, "aten.sum.default", "rows that another operation leaves out"),
        (other_rows, "aten.gather.default", "nothing says that"),
    ],
)
def test_what_needs_all_rows_is_refused_by_name(
    loss_fn: Callable[[Any, Any], Any], operation: str, reason: str
) -> None:
    joint, _ = joint_of(loss_fn, (4, 6))
    with pytest.raises(CaptureError, match="cannot be computed in chunks") as caught:
        chunked(joint.program, 2)
    message = str(caught.value)
    assert reason in message, message
    assert "test_chunk_loss.py:" in message, message
    assert operation in message, message


def test_a_loss_without_a_head_is_refused() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            return self.w * x

    joint = capture(Scale(), lambda output, given: TokenLoss(output.sum(), 1), (torch.ones(4, 3),))
    with pytest.raises(CaptureError, match="there is no head"):
        chunked(PassManager(joint_passes(seeded=False)).run(joint.program), 2)


def test_the_number_of_chunks_is_whole() -> None:
    with pytest.raises(PlanError, match="takes the number of chunks"):
        ChunkLoss(0)
