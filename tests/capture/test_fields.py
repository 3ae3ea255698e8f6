"""Batch fields are matched by use: a field that nobody reads changes nothing."""

from __future__ import annotations

import copy

import torch
from torch import nn

from graphcomp import Plan, mean_loss
from graphcomp.capture.fields import Fields
from graphcomp.ir.signature import BatchLeaf
from graphcomp.testing import VirtualStep


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, power: int = 1) -> torch.Tensor:
        return self.layer(x) ** power


def loss_fn(output: torch.Tensor, batch: dict) -> object:
    return mean_loss((output * batch["weight"]).square().mean())


def batch(**more: object) -> dict:
    return {"x": torch.ones(2, 3), "weight": torch.tensor(2.0), **more}


def step() -> VirtualStep:
    return VirtualStep(Scale(), loss_fn, plan=Plan(backend="eager", quiet=True))


def test_a_field_that_nobody_reads_is_no_input_and_leads_to_no_capture() -> None:
    one = step()
    for number, shape in enumerate([(4,), (2, 7), (1,)]):
        one.run([batch(source=f"file {number}", extra=torch.zeros(shape))])
    assert one.compiler.traces == 1
    inputs = one.compiler.specialisations[0].joint.program.inputs
    assert {role.path for role in inputs if isinstance(role, BatchLeaf)} == {"x", "weight"}


def test_a_field_that_the_forward_takes_by_name_selects_a_program() -> None:
    one = step()
    for power in (1, 2, 1, 2):
        one.run([batch(power=power, source=power)])
    assert one.compiler.traces == 2


def test_another_set_of_fields_is_looked_at_anew() -> None:
    one = step()
    plain = one.run([batch()]).result.loss
    powered = one.run([batch(power=2)]).result.loss
    assert float(plain) != float(powered)
    assert one.compiler.traces == 2


def test_looking_at_the_batch_as_a_whole_reads_all_of_it() -> None:
    views = [dict, list, reversed, repr, lambda b: {**b}, lambda b: b.copy(), lambda b: b.items(), lambda b: b.values()]
    joined = [lambda b: b | {"a": 3}, lambda b: {"a": 3} | b, lambda b: b == {}, lambda b: b.popitem(), copy.copy]
    for look in (*views, *joined):
        fields = Fields({"a": 1, "b": 2})
        look(fields)
        assert fields.read == {"a", "b"}, look
    fields = Fields({"a": 1, "b": 2})
    assert (fields["a"], fields.get("c"), "b" in fields, len(fields)) == (1, None, True, 2)
    assert fields.read == {"a", "c"}
    assert fields.setdefault("b", 5) == 2 and fields.read == {"a", "b", "c"}


def test_a_field_that_is_read_out_of_a_joined_batch_selects_a_program() -> None:
    def signed(output: torch.Tensor, batch: dict) -> object:
        more = batch | {"unit": 1.0}
        loss = output.square().mean() * more["unit"]
        return mean_loss(-loss if more["negate"] else loss)

    one = VirtualStep(Scale(), signed, plan=Plan(backend="eager", quiet=True))
    losses = [float(one.run([batch(negate=negate)]).result.loss) for negate in (False, True)]
    assert losses[1] == -losses[0] != 0
