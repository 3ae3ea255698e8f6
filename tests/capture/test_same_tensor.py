"""One tensor in two fields of the example: the program still reads both fields."""

from __future__ import annotations

import torch

from graphcomp.capture import capture
from graphcomp.ir.signature import BatchLeaf
from tests.zoo import ZOO


def test_fields_that_share_a_tensor_stay_two_inputs() -> None:
    case = ZOO["gpt"]
    tokens = torch.randint(64, (2, 8))
    joint = capture(case.build(), case.loss_fn, {"tokens": tokens, "labels": tokens})
    assert {what.path for what in joint.program.inputs if isinstance(what, BatchLeaf)} == {"tokens", "labels"}
