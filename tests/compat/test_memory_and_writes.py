"""What the first values of a model on meta rest on: whose memory it is, who writes to it, and a look before that."""

from __future__ import annotations

from typing import Any

import torch

from graphcomp.compat.aliasing import memory_of, written_values
from graphcomp.compat.dispatch import BeforeCalls


def test_memory_on_meta_can_be_told_apart() -> None:
    one, other = (torch.empty(3, 2, device="meta", requires_grad=True) for _ in range(2))
    assert one.data_ptr() == other.data_ptr() == 0  # once this fails, the address is enough
    assert memory_of(one) == memory_of(one[1]) == memory_of(one.data) == memory_of(one.detach().t())
    assert memory_of(one) != memory_of(other)


def test_who_is_written_to() -> None:
    seen: list[tuple[str, list[int]]] = []

    def look(operator: Any, args: Any, kwargs: Any) -> None:
        written = [id(each) for each in written_values(operator, args, kwargs)]
        seen.append((operator.__name__, written))

    to, source = torch.zeros(2), torch.ones(2)
    with BeforeCalls(look):
        to.normal_(generator=None)
        to + source
        torch.add(to, source, out=to)
        torch._foreach_mul_([to, source], 2.0)
    expected = [id(to)], [], [id(to)], [id(to), id(source)]
    assert [written for _, written in seen] == list(expected)


def test_the_look_comes_before_the_operator_runs() -> None:
    value, seen = torch.zeros(1), []
    with BeforeCalls(lambda *_: seen.append(value.tolist())):
        value.fill_(3.0)
    assert (seen, value.tolist()) == ([[0.0]], [3.0])
