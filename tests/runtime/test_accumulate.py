"""A gradient is added to in place only if nothing else uses its memory."""

from __future__ import annotations

import pytest
import torch

from graphcomp.runtime.accumulate import adopt, shared_results, storages
from tests.runtime.chain import WIDTH, chain, run


def owned(results: list[object], inputs: list[object]) -> list[bool]:
    shared = shared_results(results, storages(inputs))
    return [place not in shared for place in range(len(results))]


def test_fresh_results_are_owned() -> None:
    assert owned([torch.ones(2), torch.ones(2), None, 3], [torch.ones(2), 3, None])[:2] == [True, True]


def test_two_results_that_are_one_tensor_are_not() -> None:
    grad = torch.ones(2)
    assert owned([grad, grad, torch.ones(2)], []) == [False, False, True]


def test_an_input_or_a_view_of_one_is_not() -> None:
    weight = torch.ones(2, 3)
    assert owned([weight, weight.t(), weight[0], weight * 2], [weight]) == [False, False, False, True]


def test_a_part_of_larger_memory_is_not() -> None:
    assert owned([torch.ones(4)[:2]], []) == [False]


def test_the_address_of_an_input_that_is_gone_may_be_used_again() -> None:
    inputs: list[object] = [torch.ones(2)]
    before = storages(inputs)
    address = inputs.pop().data_ptr()  # type: ignore[attr-defined]
    result = torch.ones(2)
    if result.data_ptr() == address:  # up to the allocator
        assert not shared_results([result], before)
    before = {result.data_ptr(): before[address]}
    assert not shared_results([result], before)


def test_adopting_copies_only_if_it_must() -> None:
    grad, parameter = torch.ones(2, 3), torch.zeros(2, 3)
    assert adopt(grad, True, parameter, None) is grad
    assert adopt(grad, False, parameter, None) is not grad
    assert adopt(grad, True, parameter, torch.float64).dtype is torch.float64
    transposed = torch.ones(3, 2).t()
    assert adopt(transposed, True, parameter, None).stride() == (3, 1)
    assert adopt(transposed, True, None, None) is transposed


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_accumulation_never_writes_into_what_others_read(name: str) -> None:
    """Stage 1 yields what it receives as two gradients and sends it on; stage 0 yields its parameter's own
    memory.
    """
    made, arrivals = chain(3), []

    def pass_on(w: torch.Tensor, x: torch.Tensor, h: torch.Tensor, arrived: torch.Tensor) -> list[torch.Tensor]:
        return [arrived, arrived, arrived[0]]

    def own_memory(w: torch.Tensor, x: torch.Tensor, h: torch.Tensor, arrived: torch.Tensor) -> list[torch.Tensor]:
        arrivals.append(arrived)
        return [w.detach(), w.detach()[0]]

    made.callables[1, "backward"], made.callables[0, "backward"] = pass_on, own_memory
    before = {key: value.detach().clone() for key, value in made.parameters.items()}
    outcome = run(made, name, [torch.randn(WIDTH, WIDTH) for _ in range(3)])
    assert all(torch.equal(made.parameters[key], value) for key, value in before.items())
    assert torch.equal(outcome.gradients["w0"], before["w0"] + before["w0"] + before["w0"])
    total = arrivals[0] + arrivals[1] + arrivals[2]
    assert torch.equal(outcome.gradients["w1"], total)
    assert torch.equal(outcome.gradients["b1"], total[0])
