"""Outputs come back in the model's own type."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphcomp import Plan
from graphcomp.compat.pytree import tree_flatten
from graphcomp.errors import StepError
from graphcomp.ir.signature import Output
from graphcomp.runtime.results.result import rebuild_output
from graphcomp.testing import run_virtual
from tests.runtime.chain import chain, program


def test_outputs_are_rebuilt_around_plain_leaves() -> None:
    model_output = {"logits": torch.zeros(2), "note": ".logits", "cache": (None, 3)}
    leaves, tree = tree_flatten(model_output)
    kept = [Output(".logits") if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    joint = dataclasses.replace(
        chain(1).cut.joint,
        program=program("joint", [], [Output(".logits")]),
        output_tree=tree,
        output_leaves=tuple(kept),
    )
    logits = torch.ones(2)
    rebuilt = rebuild_output(joint, {".logits": logits}, {})
    assert rebuilt["logits"] is logits
    assert {key: value for key, value in rebuilt.items() if key != "logits"} == {
        "note": ".logits",
        "cache": (None, 3),
    }
    assert rebuild_output(joint, {}, {})["logits"] is None
    assert rebuild_output(dataclasses.replace(joint, output_tree=None), {}, {}) is None


class Telling(nn.Module):
    """Its output holds numbers that are formulas of its inputs' sizes; of `mask`, nothing else is read."""

    def __init__(self, counts: bool = False) -> None:
        super().__init__()
        self.first, self.second, self.counts = nn.Linear(3, 3), nn.Linear(3, 3), counts

    def forward(self, x: Tensor, mask: Tensor) -> dict[str, Any]:
        y = self.second(self.first(x))
        sizes = {"length": x.shape[1], "half": x.shape[1] / 2, "area": [x.shape[0] * x.shape[1] + 1, mask.shape[0]]}
        counted = {"found": x.gt(0).nonzero().shape[0]} if self.counts else {}
        return {"y": y, **sizes, "long": x.shape[1] > 3, **counted}


def telling(model: nn.Module, stages: int) -> Any:
    batches = [{"x": torch.randn(2, length, 3), "mask": torch.zeros(rows)} for length, rows in ((2, 4), (5, 7))]
    plan = Plan(stages=stages, split=["second"][: stages - 1], backend="eager", quiet=True)
    result, _ = run_virtual(model, lambda output, _: output["y"].square().mean(), batches, plan=plan, outputs="local")
    return result.outputs, [model(**batch) for batch in batches]


@pytest.mark.parametrize("stages", [1, 2])
def test_numbers_that_follow_from_sizes_are_those_of_each_microbatch(stages: int) -> None:
    for found, expected in zip(*telling(Telling(), stages), strict=True):
        torch.testing.assert_close(found.pop("y"), expected.pop("y"))
        assert found == expected
        assert [type(each) for each in found.values()] == [int, float, list, bool]


def test_a_number_out_of_contents_is_refused() -> None:
    with pytest.raises(StepError, match="holds a number out of the contents of a tensor") as caught:
        telling(Telling(counts=True), 1)
    assert (caught.value.where, caught.value.do) == ("output found", "let the model return it as a tensor")
