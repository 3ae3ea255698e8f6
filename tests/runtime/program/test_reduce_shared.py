"""Gradients of parameters that several stages use."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from graphcomp.errors import PartitionError
from graphcomp.ir.signature import Grad
from graphcomp.runtime.program.executor import run_virtual_ranks
from graphcomp.runtime.program.lower import lower
from tests.runtime.chain import WIDTH, Chain, chain, executors_of, plain_loop, programs_of, schedule_of


def run(made: Chain, microbatches: int) -> tuple[list[dict[str, torch.Tensor]], list[int]]:
    inputs = made.inputs([torch.randn(2 + number, WIDTH) for number in range(microbatches)])
    results = run_virtual_ranks(executors_of(made, programs_of(made, "1f1b", microbatches), inputs))
    return [dict(one.gradients[rank]) for rank, one in enumerate(results)], [one.messages for one in results]


@pytest.mark.parametrize("tied", [(0, 3), (0, 1, 3), (1, 2), (0, 1, 2, 3)])
def test_all_copies_hold_the_same_sum(tied: tuple[int, ...]) -> None:
    made = chain(4, tied=tied)
    torch.manual_seed(3)
    gradients, messages = run(made, 3)
    name = f"w{tied[0]}"
    for stage in tied[1:]:
        assert torch.equal(gradients[stage][name], gradients[tied[0]][name])
    torch.manual_seed(3)
    plain = plain_loop(made, [torch.randn(2 + number, WIDTH) for number in range(3)])
    torch.testing.assert_close(gradients[tied[0]][name], plain.gradients[name], rtol=1e-6, atol=1e-6)
    # Once a step, whatever the number of microbatches: one message up and one down for each further holder.
    extra = [0] * 4
    for stage in tied[1:]:
        extra[stage] += 1
        extra[tied[0]] += 1
    assert [got - more for got, more in zip(messages, extra, strict=True)] == [3, 6, 6, 3]


def test_the_sum_is_in_ascending_order_of_stages() -> None:
    made, shares = chain(3, tied=(0, 1, 2)), (1e8, 1.0, -1e8)
    for stage in range(3):
        kind = "fused" if stage == 2 else "backward"
        inner = made.callables[stage, kind]

        def share(*inputs: torch.Tensor, inner: object = inner, stage: int = stage) -> list[torch.Tensor]:
            results = list(inner(*inputs))  # type: ignore[operator]
            results[-2] = torch.full((WIDTH, WIDTH), shares[stage])
            return results

        made.callables[stage, kind] = share
    gradients, _ = run(made, 1)
    expected = (torch.tensor(shares[0]) + torch.tensor(shares[1])) + torch.tensor(shares[2])
    assert all(float(one["w0"][0, 0]) == float(expected) for one in gradients)


def test_a_holder_without_a_gradient_receives_the_sum_of_the_others() -> None:
    made = chain(3, tied=(0, 1, 2))
    first = made.cut.stages[0].backward
    graph_output = first.output_node
    roles = list(first.outputs)
    place = roles.index(Grad("w0"))
    values = list(first.results)
    values[place] = None
    graph_output.args = (tuple(values),)
    gradients, messages = run(made, 2)
    assert torch.equal(gradients[0]["w0"], gradients[2]["w0"])
    assert torch.equal(gradients[0]["w0"], gradients[1]["w0"])
    assert messages == [2 + 2, 4 + 1, 2 + 1]


def test_the_sum_is_in_the_accumulation_dtype() -> None:
    made, given = chain(3, tied=(0, 2)), [torch.randn(2, WIDTH) for _ in range(2)]
    executors = executors_of(made, programs_of(made, "1f1b", 2), made.inputs(given), torch.float64)
    first, _, last = (one.gradients[rank] for rank, one in enumerate(run_virtual_ranks(executors)))
    assert first["w0"].dtype is torch.float64
    assert torch.equal(first["w0"], last["w0"])


def test_no_microbatch_no_gradient() -> None:
    gradients, messages = run(chain(2, tied=(0, 1)), 0)
    assert gradients == [{}, {}]
    assert messages == [0, 0]


def test_stages_of_one_rank_cannot_share_yet() -> None:
    made = chain(3, tied=(0, 2))
    schedule = dataclasses.replace(schedule_of(made.cut, "gpipe", 1), placement=(0, 1, 0))
    with pytest.raises(PartitionError, match="'w0' is shared by stages that do not have a rank each"):
        lower([made.cut], schedule, 0)
