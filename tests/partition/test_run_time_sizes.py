"""No cut separates values of run-time size from what reads them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphcomp as gc
from graphcomp.capture import Joint, capture
from graphcomp.compat.run_time_sizes import is_run_time
from graphcomp.compiler import joint_passes
from graphcomp.errors import PartitionError
from graphcomp.inspect.explain import explain
from graphcomp.ir import meta
from graphcomp.ir.digest import digest
from graphcomp.ir.pickling import from_bytes, to_bytes
from graphcomp.ir.signature import Saved
from graphcomp.ir.verify import verify
from graphcomp.partition import partition
from graphcomp.partition.cuts import owned_forward
from graphcomp.partition.run_time_sizes import uncuttable
from graphcomp.partition.traits import replicable_nodes
from graphcomp.passes.manager import PassManager
from tests.collectives.fake import fake_mesh


class Routed(nn.Module):
    """Rows go to another rank between `first` and `last`, where `there` and `again` see them."""

    def __init__(self, mesh: Any, comes_back: bool = True) -> None:
        super().__init__()
        self.first, self.there = nn.Linear(4, 4), nn.Linear(4, 4)
        self.again, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.mesh, self.comes_back = mesh, comes_back

    def forward(self, x: Tensor, splits: Tensor) -> Tensor:
        h = self.first(x)
        received = gc.collectives.all_to_all(splits, self.mesh)
        rows = gc.collectives.all_to_all(h, self.mesh, received, splits)
        rows = self.within(rows)
        if not self.comes_back:
            return rows
        back = gc.collectives.all_to_all(rows, self.mesh, splits, received)
        return self.last(back.tanh())

    def within(self, rows: Tensor) -> Tensor:
        return self.again(self.there(rows).tanh())


class Padded(Routed):
    """The backward needs twice the number of rows, which only it computes."""

    def within(self, rows: Tensor) -> Tensor:
        rows = self.there(rows)
        return self.again(torch.cat([rows, rows.tanh()])[: rows.shape[0]])


def joint_of(comes_back: bool = True, form: type[Routed] = Routed) -> Joint:
    def loss_fn(output: Tensor, batch: Any) -> Tensor:
        return output.square().sum()

    with fake_mesh(dp=2) as mesh:
        batch = {"x": torch.ones(6, 4), "splits": torch.tensor([2, 4])}
        joint = capture(form(mesh["dp"], comes_back), loss_fn, batch, mesh=mesh)
    return replace(joint, program=PassManager(joint_passes(seeded=True)).run(joint.program))


def modules_of(cut: Any) -> list[set[str | None]]:
    return [{meta.note(node).module for node in stage.forward.calls()} for stage in cut.stages]


@pytest.mark.parametrize("form", [Routed, Padded])
@pytest.mark.parametrize("stages", [2, 3])
def test_a_balanced_cut_stands_elsewhere(stages: int, form: type[Routed]) -> None:
    cut = partition(joint_of(form=form), stages)
    places = [next(i for i, names in enumerate(modules_of(cut)) if name in names) for name in ("there", "again")]
    assert places[0] == places[1]
    boundaries = [*cut.forward_boundaries.values(), *cut.backward_boundaries.values()]
    assert boundaries and not any(is_run_time(size) for b in boundaries for v in b.values for size in v.shape)


def test_a_plain_number_is_kept_for_the_backward() -> None:
    cut = partition(joint_of(), 2, ["last"])
    backward = cut.stages[0].backward
    assert backward is not None
    kept = [node for what, node in backward.input_nodes() if isinstance(what, Saved)]
    assert {str(meta.value(node)) for node in kept if isinstance(meta.value(node), torch.SymInt)}
    assert "int u0 = saved" in str(backward)


@pytest.mark.parametrize("name", ["there", "again"])
def test_a_named_split_in_between_is_refused(name: str) -> None:
    with pytest.raises(PartitionError, match="the number of rows is known at run time only") as caught:
        partition(joint_of(), 2, [name])
    assert f"names '{name}'" in str(caught.value.got)
    assert "test_run_time_sizes.py:" in str(caught.value.where)
    assert "capacity=" in str(caught.value.do)


def test_more_stages_than_there_are_places_for_cuts() -> None:
    with pytest.raises(PartitionError, match="what belongs together is in the way") as caught:
        partition(joint_of(), 4)
    assert (caught.value.expected, caught.value.got) == ("1 to 3", 4)


def test_every_possible_cut_is_sound_or_known_not_to_be() -> None:
    """Where the rule allows a cut, the stages are valid programs."""
    joint = joint_of()
    forward = owned_forward(joint.program, replicable_nodes(joint.program))
    inside = uncuttable(forward)
    assert inside and len(inside) < len(forward) - 1
    for program in partition(joint, 3).programs:
        verify(program)


def test_an_output_of_run_time_size_leaves_no_pipeline() -> None:
    joint = joint_of(comes_back=False)
    partition(joint, 1)
    with pytest.raises(PartitionError, match="'output output' has a number of rows"):
        partition(joint, 2)


def test_estimates_and_texts() -> None:
    """Sizes that nobody knows are guessed: as many rows come as go."""
    cut = partition(joint_of(), 2, ["last"])
    with fake_mesh(dp=2):
        compiler = gc.GraphCompiler(nn.Linear(1, 1), None, gc.Plan(stages=2, quiet=True))
    text = explain(cut, gc.Plan(stages=2), compiler.schedule([cut, cut]))
    assert "saved" in text and str(cut) == str(partition(joint_of(), 2, ["last"]))


def test_programs_are_written_and_read() -> None:
    joint = joint_of()
    cut = partition(replace(joint, captured={}), 2, ["last"])
    again = from_bytes(to_bytes(cut))
    assert str(again) == str(cut)
    for one, two in zip(cut.programs, again.programs, strict=True):
        verify(two)
        assert digest(one) == digest(two)
