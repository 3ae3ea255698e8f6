"""Outputs come back in the model's own type."""

from __future__ import annotations

import dataclasses

import torch

from graphcomp.compat.pytree import tree_flatten
from graphcomp.ir.signature import Output
from graphcomp.runtime.results.result import rebuild_output
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
    rebuilt = rebuild_output(joint, {".logits": logits})
    assert rebuilt["logits"] is logits
    assert {key: value for key, value in rebuilt.items() if key != "logits"} == {
        "note": ".logits",
        "cache": (None, 3),
    }
    assert rebuild_output(joint, {})["logits"] is None
    assert rebuild_output(dataclasses.replace(joint, output_tree=None), {}) is None
