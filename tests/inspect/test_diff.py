"""Differences between texts and between executions."""

from __future__ import annotations

import torch

from graphcomp.inspect import diff, first_difference
from graphcomp.ir import interp
from graphcomp.ir import signature as role
from tests.partition.running import inputs_of, joint_of
from tests.zoo import ZOO

BEFORE = """\
joint program "tiny"
  %x: f32[s0, 8] = batch x
forward:
  %t: f32[8, 4] = t(%w)       # fc
  %view: f32[s0, 8] = view(%x, [s0, 8])       # fc
  %mm: f32[s0, 4] = mm(%view, %t)       # fc
  %relu: f32[s0, 4] = relu(%mm)
return output y = %relu
"""
AFTER = """\
joint program "tiny"
  %x: f32[s0, 8] = batch x
forward:
  %t_1: f32[8, 4] = t(%w)  # fc
  %mm_1: f32[s0, 4] = mm(%x, %t_1)  # fc
  %relu_1: f32[s0, 4] = relu(%mm_1)
return output y = %relu_1
"""


def test_equal_up_to_names_is_no_difference() -> None:
    assert diff(BEFORE, BEFORE.replace("%mm", "%product").replace("%t", "%turned")) == ""


def test_only_what_a_pass_changed_is_shown() -> None:
    text = diff(BEFORE, AFTER)
    changed = [line for line in text.splitlines() if line[0] in "+-" and not line.startswith(("+++", "---"))]
    assert [line.split("#")[0].strip() for line in changed[:2]] == [
        "-  %view: f32[s0, 8] = view(%x, [s0, 8])",
        "-  %mm: f32[s0, 4] = mm(%view, %t)",
    ]
    assert "+  %mm_1: f32[s0, 4] = mm(%x, %t)  # fc" in changed
    assert not any("t_1" in line for line in changed)


def test_no_new_difference_between_equal_operations() -> None:
    one = "  %a: f32[] = sin(%x)\n  %b: f32[] = sin(%x)\n  %c: f32[] = add(%a, %b)\n"
    two = "  %q: f32[] = sin(%x)\n  %a: f32[] = sin(%x)\n  %b: f32[] = add(%q, %a)\n"
    assert diff(one, two) == ""
    assert diff(one, two.replace("(%q, %a)", "(%a, %q)")) != ""


def test_the_first_node_with_another_value_is_named_with_module_and_line() -> None:
    case = ZOO["gpt"]
    model, batch = case.build(), case.microbatches(1)[0]
    joint = joint_of(model, case.loss_fn, batch)
    given = inputs_of(joint, model, batch)
    assert first_difference(joint.program, given, given) is None
    with torch.no_grad():
        model.blocks[1].mlp[0].bias[3] += 0.5
    changed = inputs_of(joint, model, batch)
    given[role.Param("blocks.1.mlp.0.bias")] = changed[role.Param("blocks.1.mlp.0.bias")].clone()
    given[role.Param("blocks.1.mlp.0.bias")][3] -= 0.5
    found = first_difference(joint.program, given, changed)
    assert found is not None and found.node == "%blocks_1_mlp_0_bias"
    values = {n.name: v for n, v in interp.trace_values(joint.program, changed) if n.op == "call_function"}
    found = first_difference(joint.program, given, values)
    assert found is not None and (found.module, round(found.largest, 6)) == ("blocks.1.mlp.0", 0.5)
    assert "gpt.py:" in str(found) and "largest difference 0.5 in float32[32, 128]" in str(found)
    assert first_difference(joint.program, given, values, atol=100.0) is None


def test_two_executions_draw_the_same_random_numbers() -> None:
    case = ZOO["dropout"]
    model, batch = case.build(), case.microbatches(1)[0]
    joint = joint_of(model, case.loss_fn, batch)
    given = inputs_of(joint, model, batch)
    assert first_difference(joint.program, given, given) is None
