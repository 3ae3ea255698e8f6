"""Programs as bytes and back: the same text, the same digest, the same numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import graphcomp as gc
from graphcomp.capture import capture
from graphcomp.ir import meta
from graphcomp.ir.digest import digest
from graphcomp.ir.interp import boxed_callable
from graphcomp.ir.pickling import from_bytes, to_bytes
from graphcomp.ir.program import Program
from graphcomp.ir.verify import verify
from graphcomp.partition import partition
from graphcomp.passes.manager import PassManager
from tests.zoo import ZOO


@pytest.mark.parametrize("name", ["gpt", "moe", "batch_norm"])
def test_programs_come_back_as_they_were(name: str) -> None:
    case = ZOO[name]
    joint = capture(case.build(), case.loss_fn, case.microbatches(1)[0])
    joint = replace(joint, program=PassManager(gc.compiler.joint_passes(False)).run(joint.program), captured={})
    cut = partition(joint, 1 if name == "batch_norm" else 2, None)
    again = from_bytes(to_bytes(cut))
    assert again is not cut and str(again) == str(cut)
    for one, two in zip((*cut.programs, joint.program), (*again.programs, again.joint.program), strict=True):
        verify(two, made_by="reading back")
        assert digest(one) == digest(two) and one.inputs == two.inputs
        assert [meta.noted(node) for node in one.graph.nodes] == [meta.noted(node) for node in two.graph.nodes]
    # One fake mode for all of them, as before: it owns the symbols.
    assert len({id(program.fake_mode) for program in again.programs}) == 1
    assert again.joint.sizes.conditions == joint.sizes.conditions
    assert again.joint.sizes.symbols == joint.sizes.symbols


def test_constants_and_numbers_come_along() -> None:
    def loss_fn(output: torch.Tensor, batch: torch.Tensor) -> gc.TokenLoss:
        weights = torch.tensor([0.5, 2.0])
        return gc.TokenLoss((output * weights).sum() / batch.shape[0], batch.shape[0])

    joint = capture(torch.nn.Linear(3, 2), loss_fn, torch.randn(5, 3))
    program = PassManager(gc.compiler.joint_passes(False)).run(joint.program)
    again = from_bytes(to_bytes(program))
    inputs = {"weight": torch.randn(2, 3), "bias": torch.randn(2), "batch": torch.randn(4, 3)}

    def run(one: Program) -> list[torch.Tensor]:
        given = []
        for what, node in one.input_nodes():
            value = meta.tensor(node)
            match str(what).split(" ")[0]:
                case "param" | "batch":
                    given.append(inputs[str(what).split(" ")[1]])
                case "constant":
                    given.append(one.constants[what.name])
                case "size":
                    given.append(4)
                case _:
                    given.append(torch.ones((), dtype=value.dtype))
        return [x for x in boxed_callable(one)(given) if x is not None]

    assert all(torch.equal(a, b) for a, b in zip(run(program), run(again), strict=True))


def test_objects_outside_are_found_by_name() -> None:
    mine = object()
    data = to_bytes({"here": (mine, 1)}, lambda value: "mine" if value is mine else None)
    assert from_bytes(data, {"mine": "another"}) == {"here": ("another", 1)}
    with pytest.raises(KeyError):
        from_bytes(data)
