"""Gradients of parameters that several stages use."""

from __future__ import annotations

import pytest
import torch

from graphcomp.ir.signature import Grad
from graphcomp.runtime.program.executor import run_virtual_ranks
from tests.runtime.chain import WIDTH, Chain, chain, executors_of, plain_loop, programs_of


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


@pytest.mark.parametrize(
    ("tied", "messages"),
    # Stages 0 and 2 are on rank 0. With all four, rank 1 gives two shares and gets one sum.
    [((0, 2), [0, 0]), ((1, 2), [1, 1]), ((0, 3), [1, 1]), ((0, 1, 2, 3), [1, 2]), ((1, 2, 3), [1, 1])],
)
@pytest.mark.parametrize("name", ["gpipe", "interleaved-1f1b"])
def test_several_stages_on_a_rank(name: str, tied: tuple[int, ...], messages: list[int]) -> None:
    """Bitwise what stages on ranks of their own add up, and on every rank that holds it."""
    made, given = chain(4, tied=tied), [torch.randn(rows, WIDTH) for rows in (2, 3, 4)]
    plain = run_virtual_ranks(executors_of(made, programs_of(made, "gpipe", 3), made.inputs(given)))
    results = run_virtual_ranks(executors_of(made, programs_of(made, name, 3, ranks=2), made.inputs(given)))
    expected = {name: value for one in plain for own in one.gradients.values() for name, value in own.items()}
    for rank, result in enumerate(results):
        assert set(result.gradients) == {rank, rank + 2}
        found = [(key, value) for own in result.gradients.values() for key, value in own.items()]
        assert all(torch.equal(value, expected[key]) for key, value in found)
        assert result.messages == 3 * 3 + messages[rank]  # both ends of one boundary, one end of the two others
