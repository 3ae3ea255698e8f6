"""Decompositions: text, annotations, refusals. Their results are compared in test_zoo.py."""

from __future__ import annotations

import pytest
import torch
from expecttest import TestCase

from graphcomp.errors import CaptureError, PlanError
from graphcomp.ir import signature as role
from graphcomp.ir.meta import Note, Phase
from graphcomp.ir.printer import print_program
from graphcomp.ir.program import Program
from graphcomp.passes import decompose
from graphcomp.passes.decompose import Decompose
from tests.ir.build import aten
from tests.passes.test_noop import Start


def sample() -> Program:
    b = Start()
    bias = b.input(role.Param("bias"), (4,), "bias")
    w = b.input(role.Param("w"), (b.sizes[1], 4), "w")
    b.note = Note(Phase.FORWARD, "fc", "model.py:7", operation=0)
    y = b.call(aten.addmm.default, bias, b.x, w)
    b.note = Note(Phase.FORWARD, "act", "model.py:8", operation=1)
    y = b.call(aten.silu.default, y)
    b.note = Note(Phase.FORWARD, "drop", "model.py:9", operation=2)
    return b.finish(b.call(aten.bernoulli.p, y, 0.5))


class TestText(TestCase):
    maxDiff = None

    def test_before_and_after(self) -> None:
        self.assertExpectedInline(
            print_program(sample()),
            """\
joint program "sample"
  %x: f32[s0, s1] = batch x
  %s0: int = size s0
  %s1: int = size s1
  %bias: f32[4] = param bias
  %w: f32[s1, 4] = param w
forward:
  %addmm: f32[s0, 4] = addmm(%bias, %x, %w)                                     # fc  model.py:7
  %silu: f32[s0, 4] = silu(%addmm)                                              # act  model.py:8
  %bernoulli: f32[s0, 4] = bernoulli.p(%silu, 0.5)                              # drop  model.py:9
return output 0 = %bernoulli
""",
        )
        self.assertExpectedInline(
            print_program(Decompose("core").apply(sample())),
            """\
joint program "sample"
  %x: f32[s0, s1] = batch x
  %s0: int = size s0
  %s1: int = size s1
  %bias: f32[4] = param bias
  %w: f32[s1, 4] = param w
forward:
  %addmm: f32[s0, 4] = addmm(%bias, %x, %w)                                     # fc  model.py:7
  %silu_sigmoid: f32[s0, 4] = sigmoid(%addmm)                                   # act  model.py:8
  %silu: f32[s0, 4] = mul.Tensor(%addmm, %silu_sigmoid)                         # act  model.py:8
  %bernoulli: f32[s0, 4] = bernoulli.p(%silu, 0.5)                              # drop  model.py:9
return output 0 = %bernoulli
""",
        )


def test_an_unknown_table_is_refused() -> None:
    with pytest.raises(PlanError, match="no such table") as error:
        Decompose("fancy")
    assert (error.value.expected, error.value.got) == ("core, inductor", "fancy")


def test_a_decomposition_that_depends_on_sizes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def silu(x: torch.Tensor) -> torch.Tensor:
        return x * x.sigmoid() if x.shape[0] == 6 else x * 0

    monkeypatch.setattr(decompose, "TABLES", {"core": lambda: {aten.silu.default: silu}})
    with pytest.raises(CaptureError, match="depend on particular sizes") as error:
        Decompose("core").apply(sample())
    assert "Eq(" in str(error.value.got)


def test_a_decomposition_that_makes_a_tensor_from_numbers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be an input that nobody gives."""
    table = {aten.silu.default: lambda x: x * torch.tensor([1.0, 2.0, 4.0, 8.0])}
    monkeypatch.setattr(decompose, "TABLES", {"inductor": lambda: table})
    with pytest.raises(CaptureError, match="replaced by makes a tensor from numbers") as caught:
        Decompose().apply(sample())
    assert "leave out the pass 'decompose'" in str(caught.value)
