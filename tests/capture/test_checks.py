"""Operators that return nothing: those that check stay, what is said of sizes is a guard, the rest is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphcomp import mean_loss
from graphcomp.capture import capture
from graphcomp.errors import CaptureError
from tests.cases.tiny import assert_equal, step_of

aten = torch.ops.aten


class Code(nn.Module):
    def __init__(self, code: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.code = code

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.code(self.first(x)))


def squared(y: Tensor, batch: Tensor) -> Any:
    return mean_loss(y.square().mean())


def small(x: Tensor) -> Tensor:
    return (x.detach().abs() < 100).all()


def asserted(x: Tensor) -> Tensor:
    torch._assert_async(small(x))
    return x


def asserted_with_text(x: Tensor) -> Tensor:
    torch._assert_async(small(x), "too large")
    return x


def asserted_with_token(x: Tensor) -> Tensor:
    aten._functional_assert_async.msg(small(x), "too large", torch.zeros(1))
    return x


@pytest.mark.parametrize("code", [asserted, asserted_with_text, asserted_with_token])
@pytest.mark.parametrize("split", [None, ["last"]], ids=["1 stage", "2 stages"])
def test_an_assertion_holds_at_every_step(code: Callable[[Tensor], Tensor], split: Any) -> None:
    model = Code(code)
    step = step_of(model, squared, split=split)
    assert_equal(model, squared, [torch.randn(3, 4)], step)
    with pytest.raises(RuntimeError) as expected:
        model(torch.full((2, 4), 1e6))
    with pytest.raises(RuntimeError) as found:
        step.run([torch.full((2, 4), 1e6)])
    assert str(found.value).partition("\n")[0] == str(expected.value).partition("\n")[0]


def test_the_text_of_a_check() -> None:
    joint = capture(Code(asserted_with_text), squared, torch.randn(3, 4))
    assert "%_assert_async: () = _assert_async.msg(%all_1, 'too large')" in str(joint)


def at_most_8(x: Tensor) -> Tensor:
    aten._assert_scalar(x.shape[0] <= 8, "too many")
    return x


def in_a_range(x: Tensor) -> Tensor:
    torch.sym_constrain_range(x.shape[0], min=2, max=8)
    return x


@pytest.mark.parametrize("code", [at_most_8, in_a_range])
def test_what_is_said_of_a_size_is_a_guard(code: Callable[[Tensor], Tensor]) -> None:
    model = Code(code)
    step = step_of(model, squared)
    assert_equal(model, squared, [torch.randn(3, 4), torch.randn(8, 4)], step)
    assert step.compiler.traces == 1
    with pytest.raises(RuntimeError):
        step.run([torch.randn(9, 4)])


def test_marks_of_the_profiler_are_left_out() -> None:
    def code(x: Tensor) -> Tensor:
        with torch.profiler.record_function("a part"):
            return x.tanh()

    model = Code(code)
    assert_equal(model, squared, [torch.randn(3, 4)], step_of(model, squared))
    assert "record_function" not in str(capture(model, squared, torch.randn(3, 4)))


def test_an_operator_without_result_is_refused_unless_torch_knows_its_effect() -> None:
    library = torch.library.Library("graphcomp_test_checks", "FRAGMENT")
    library.define("note(Tensor x) -> ()")
    library.impl("note", lambda x: None, "CompositeExplicitAutograd")
    torch.library.register_fake("graphcomp_test_checks::note", lambda x: None, lib=library)
    note = torch.ops.graphcomp_test_checks.note.default

    def code(x: Tensor) -> Tensor:
        note(x.detach())
        return x

    with pytest.raises(CaptureError) as error:
        capture(Code(code), squared, torch.randn(3, 4))
    line = code.__code__.co_firstlineno + 1
    assert f"test_checks.py:{line}" in str(error.value)
    assert "torch.fx.has_side_effect(torch.ops.graphcomp_test_checks.note.default)" in str(error.value)
    torch.fx.has_side_effect(note)
    assert "graphcomp_test_checks.note" in str(capture(Code(code), squared, torch.randn(3, 4)))
