"""Where the forward is cut: by names, and balanced."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from graphcomp.capture.joint import Joint
from graphcomp.errors import PartitionError
from graphcomp.ir import meta
from graphcomp.ir.meta import Phase
from graphcomp.partition import Partitioned, partition
from graphcomp.partition.costs import flops
from tests.partition.running import carried, check, joint_of, square_loss
from tests.zoo import ZOO
from tests.zoo.gpt import TinyGPT, loss_fn
from tests.zoo.half_frozen import HalfFrozenGPT


def gpt(blocks: int, vocab: int = 64, width: int = 32, length: int = 16) -> Joint:
    def ids() -> torch.Tensor:
        return torch.randint(vocab, (2, length))

    return joint_of(TinyGPT(vocab, width, 4, blocks), loss_fn, {"tokens": ids(), "labels": ids()})


def modules(cut: Partitioned) -> list[list[str]]:
    """The modules that run in the forward of each stage, in order, by their first two parts."""
    found = []
    for stage in cut.stages:
        names = [meta.note(node).module for node in stage.forward.calls() if meta.note(node).phase is Phase.FORWARD]
        found.append(list(dict.fromkeys(".".join(name.split(".")[:2]) for name in names if name)))
    return found


def shares(cut: Partitioned) -> list[float]:
    """The FLOPs of each stage over the mean."""
    work = [sum(flops(n) for p in (s.forward, s.backward) if p is not None for n in p.calls()) for s in cut.stages]
    return [each * len(work) / sum(work) for each in work]


def error(joint: Joint, stages: int = 1, split: Sequence[str] | None = None) -> str:
    with pytest.raises(PartitionError) as caught:
        partition(joint, stages, split)
    return str(caught.value)


@pytest.fixture(scope="module")
def four() -> Joint:
    return gpt(4)


def test_named_modules_begin_the_stages(four: Joint) -> None:
    cut = partition(four, split=["blocks.1", "blocks.3", "head"])
    assert modules(cut) == [
        ["embed", "positions", "blocks.0"],
        ["blocks.1", "blocks.2"],
        ["blocks.3", "norm"],
        ["head"],
    ]


def test_a_parent_stands_for_the_first_of_its_modules(four: Joint) -> None:
    assert modules(partition(four, split=["blocks", "norm"])) == modules(partition(four, split=["blocks.0", "norm"]))


@pytest.mark.parametrize(
    ("split", "message"),
    [
        (["blokcs.2"], "no module of that name computes anything in forward"),
        (["blokcs.2"], "such as 'blocks.2'"),
        (["blocks.2", "blocks.2"], "names 'blocks.2' twice"),
        (["blocks.3", "blocks.1"], "'blocks.1', which begins before 'blocks.3' has run"),
        (["blocks", "blocks.0"], "'blocks.0', which begins before 'blocks' has run"),
        (["embed"], "'embed', which begins before everything else has run"),
        (["block"], "no module of that name"),
        ([""], "no module of that name"),
    ],
)
def test_names_that_do_not_fit(four: Joint, split: list[str], message: str) -> None:
    assert message in error(four, split=split)


def test_too_many_stages_are_refused_with_the_largest_number() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    batch = (torch.randn(3, 4),)
    joint = joint_of(model, square_loss, batch)
    assert carried(check(model, square_loss, [batch], 3, joint=joint)) == ([1, 1], [1, 1])
    text = error(joint, 4)
    assert "cannot be cut into 4 stages" in text and "1 to 3" in text
    assert "at least one stage" in error(joint, 0)


@pytest.mark.parametrize("stages", [2, 4])
def test_blocks_of_a_gpt_stay_whole(four: Joint, stages: int) -> None:
    cut = partition(four, stages)
    per = 4 // stages
    expected = [[f"blocks.{i}" for i in range(s * per, (s + 1) * per)] for s in range(stages)]
    expected[0] = ["embed", "positions", *expected[0]]
    expected[-1] = [*expected[-1], "norm", "head"]
    assert modules(cut) == expected
    assert carried(cut) == ([1] * (stages - 1), [1] * (stages - 1))


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("blocks", [4, 8, pytest.param(12, marks=pytest.mark.wide)])
def test_balanced_with_one_value_a_cut(blocks: int, stages: int) -> None:
    cut = partition(gpt(blocks), stages)
    assert carried(cut) == ([1] * (stages - 1), [1] * (stages - 1))
    assert {v.shape[-1] for b in cut.forward_boundaries.values() for v in b.values} == {32}
    assert max(shares(cut)) < 1.25


def test_a_large_head_counts() -> None:
    cut = partition(gpt(8, vocab=4096, width=32), 2)
    assert "blocks.4" in modules(cut)[0]  # the head takes longer than two of these blocks, which are many small calls


def test_frozen_layers_weigh_less() -> None:
    case = ZOO["half_frozen"]
    cut = partition(joint_of(HalfFrozenGPT(blocks=4), case.loss_fn, case.microbatches(1)[0]), 2)
    assert modules(cut)[0][-1] == "blocks.2"
    assert max(shares(cut)) < 1.25


def test_a_chain_of_very_many_layers_is_cut_evenly() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(600)))
    cut = partition(joint_of(model, square_loss, (torch.randn(2, 4),)), 4)
    assert max(shares(cut)) < 1.1


def test_the_same_cut_every_time() -> None:
    def text(_: Any) -> str:
        torch.manual_seed(0)
        return str(partition(gpt(3), 3))

    assert text(0) == text(1)


def test_one_joint_program_may_be_cut_again_and_again() -> None:
    case = ZOO["tied_gpt"]
    joint = joint_of(case.build(), case.loss_fn, case.microbatches(1)[0])
    first = str(partition(joint, 3))
    partition(joint, 2)
    assert str(partition(joint, 3)) == first
