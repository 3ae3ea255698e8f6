"""The text of programs."""

# ruff: noqa: E501

from __future__ import annotations

import operator

import torch
from expecttest import TestCase

from graphcomp.ir import meta
from graphcomp.ir.meta import Note, Phase
from graphcomp.ir.printer import print_program, window
from graphcomp.ir.program import Level
from graphcomp.ir.signature import Activation, BatchLeaf, Grad, Output, Param, Saved
from tests.ir.build import Builder, aten, training_step


class TestText(TestCase):
    maxDiff = None

    def test_joint(self) -> None:
        self.assertExpectedInline(
            print_program(training_step()),
            """\
joint program "tiny"
  %w: f32[8, 4] = param fc.weight
  %x: f32[s0, 8] = batch x
  %s0: int = size s0
  %denominator: f32[] = denominator loss
forward:
  %mm: f32[s0, 4] = mm(%x, %w)                                                  # fc  model.py:10
  %relu: f32[s0, 4] = relu(%mm)                                                 # (root)  model.py:11
loss:
  %mul: f32[s0, 4] = mul.Tensor(%relu, 0.5)                                     # train.py:3
  %sum_1: f32[] = sum(%mul)                                                     # train.py:3
  %full: i64[] = full([], %s0, dtype=i64, device=cpu)                           # train.py:3
backward:
  %full_like: f32[s0, 4] = full_like(%relu, 0.5)                                # train.py:3  of %mul
  %div: f32[s0, 4] = div.Tensor(%full_like, %denominator)                       # train.py:3  of %mul
  %threshold_backward: f32[s0, 4] = threshold_backward(%div, %relu, 0)          # (root)  model.py:11  of %relu
  %t: f32[8, s0] = t(%x)                                                        # fc  model.py:10  of %mm
  %mm_1: f32[8, 4] = mm(%t, %threshold_backward)                                # fc  model.py:10  of %mm
return loss loss = %sum_1
return tokens loss = %full
return grad fc.weight = %mm_1
""",
        )

    def test_without_notes(self) -> None:
        self.assertExpectedInline(
            print_program(training_step(), notes=False),
            """\
joint program "tiny"
  %w: f32[8, 4] = param fc.weight
  %x: f32[s0, 8] = batch x
  %s0: int = size s0
  %denominator: f32[] = denominator loss
  %mm: f32[s0, 4] = mm(%x, %w)
  %relu: f32[s0, 4] = relu(%mm)
  %mul: f32[s0, 4] = mul.Tensor(%relu, 0.5)
  %sum_1: f32[] = sum(%mul)
  %full: i64[] = full([], %s0, dtype=i64, device=cpu)
  %full_like: f32[s0, 4] = full_like(%relu, 0.5)
  %div: f32[s0, 4] = div.Tensor(%full_like, %denominator)
  %threshold_backward: f32[s0, 4] = threshold_backward(%div, %relu, 0)
  %t: f32[8, s0] = t(%x)
  %mm_1: f32[8, 4] = mm(%t, %threshold_backward)
return loss loss = %sum_1
return tokens loss = %full
return grad fc.weight = %mm_1
""",
        )

    def test_sizes_and_strides(self) -> None:
        b = Builder()
        x = b.input(BatchLeaf("x"), b.leaf, "x")
        w = b.input(Param("w"), torch.empty_strided((4, 8), (1, 4)), "w")
        product = b.call(operator.mul, b.size(0), b.size(1))
        y = b.call(aten.view.default, x, [product])
        y = b.call(aten.slice.Tensor, y, 0, 1, 9223372036854775807)
        split = b.call(aten.split.Tensor, w, 2)
        part = b.call(operator.getitem, split, 1)
        program = b.program({Output("y"): y, Output("part"): part})
        self.assertExpectedInline(
            print_program(program),
            """\
joint program "sample"
  %x: f32[s0, s1] = batch x
  %w: f32[4, 8] strides [1, 4] = param w
  %s0: int = size s0
  %s1: int = size s1
forward:
  %mul: int s0*s1 = %s0 * %s1
  %view: f32[s0*s1] = view(%x, [%mul])
  %slice_1: f32[s0*s1 - 1] = slice.Tensor(%view, 0, 1, 9223372036854775807)
  %split: (f32[2, 8], f32[2, 8]) = split.Tensor(%w, 2)
  %getitem: f32[2, 8] = %split[1]
return output y = %slice_1
return output part = %getitem
""",
        )

    def test_stage(self) -> None:
        b = Builder()
        received = b.input(Activation(0, 1, 0), b.leaf, "h")
        b.note = Note(Phase.BACKWARD, "up", "/somewhere/model.py:7", operation=9, gradient_sum=True, recompute=2)
        total = b.call(aten.add.Tensor, received, received)
        outputs = {Activation(1, 0, 0): total, Saved(0): received, Grad("w"): None}
        self.assertExpectedInline(
            print_program(b.program(outputs, level=Level.STAGE)),
            """\
stage program "sample"
  %h: f32[s0, s1] = activation 0>1[0]
backward:
  %add: f32[s0, s1] = add.Tensor(%h, %h)                                        # up  model.py:7  gradient sum  recompute 2
return gradient 1>0[0] = %add
return saved 0 = %h
return grad w = None
""",
        )

    def test_groups(self) -> None:
        b = Builder()
        x = b.input(BatchLeaf("x"), b.leaf, "x")
        c10d = torch.ops._c10d_functional
        for group in ("7", "12", "7", "tp", "ranks(0,2)"):
            node = b.graph.call_function(c10d.all_reduce.default, (x, "sum", group))
            meta.set_value(node, b.leaf)
            x = b.call(c10d.wait_tensor.default, node)
        program = b.program({Output("y"): x})
        self.assertExpectedInline(
            print_program(program, groups={"12": "dp"}),
            """\
joint program "sample"
  %x: f32[s0, s1] = batch x
forward:
  %all_reduce_default: f32[s0, s1] = _c10d_functional.all_reduce(%x, 'sum', group0)
  %wait_tensor: f32[s0, s1] = _c10d_functional.wait_tensor(%all_reduce_default)
  %all_reduce_default_1: f32[s0, s1] = _c10d_functional.all_reduce(%wait_tensor, 'sum', dp)
  %wait_tensor_1: f32[s0, s1] = _c10d_functional.wait_tensor(%all_reduce_default_1)
  %all_reduce_default_2: f32[s0, s1] = _c10d_functional.all_reduce(%wait_tensor_1, 'sum', group0)
  %wait_tensor_2: f32[s0, s1] = _c10d_functional.wait_tensor(%all_reduce_default_2)
  %all_reduce_default_3: f32[s0, s1] = _c10d_functional.all_reduce(%wait_tensor_2, 'sum', tp)
  %wait_tensor_3: f32[s0, s1] = _c10d_functional.wait_tensor(%all_reduce_default_3)
  %all_reduce_default_4: f32[s0, s1] = _c10d_functional.all_reduce(%wait_tensor_3, 'sum', ranks(0,2))
  %wait_tensor_4: f32[s0, s1] = _c10d_functional.wait_tensor(%all_reduce_default_4)
return output y = %wait_tensor_4
""",
        )

    def test_window(self) -> None:
        program = training_step()
        self.assertExpectedInline(
            window(program, program.calls()[0], around=2),
            """\
  %s0: int = size s0
  %denominator: f32[] = denominator loss
> %mm: f32[s0, 4] = mm(%x, %w)                                                  # fc  model.py:10
  %relu: f32[s0, 4] = relu(%mm)                                                 # (root)  model.py:11
  %mul: f32[s0, 4] = mul.Tensor(%relu, 0.5)                                     # train.py:3""",
        )
        self.assertExpectedInline(
            window(program, program.output_node, around=1),
            """\
  %mm_1: f32[8, 4] = mm(%t, %threshold_backward)                                # fc  model.py:10  of %mm
> return loss loss = %sum_1
> return tokens loss = %full
> return grad fc.weight = %mm_1""",
        )


def test_same_text_whatever_symbols_are_called() -> None:
    """Symbols get their names from where they are read; the text numbers them."""
    texts = []
    for leaf in ("first", "second"):
        b = Builder(leaf, (6, 8))
        x = b.input(BatchLeaf("x"), b.leaf, "x")
        texts.append((print_program(b.program({Output("y"): b.call(aten.relu.default, x)})), str(b.sizes[0])))
    assert texts[0][0] == texts[1][0]


def test_text_of_a_copy_is_the_same() -> None:
    program = training_step()
    assert str(program.copy()) == str(program) == print_program(program)


def test_a_node_called_like_a_symbol_is_told_apart() -> None:
    b = Builder()
    x = b.input(BatchLeaf("x"), b.leaf, "s0")
    b.size(0)
    text = print_program(b.program({Output("y"): b.call(aten.relu.default, x)}))
    assert "%s0_: f32[s0, s1] = batch x" in text and "relu(%s0_)" in text
