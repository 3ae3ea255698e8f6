"""The largest magnitude of each of many tensors: nan and infinity come through, whatever the dtype and layout."""

from __future__ import annotations

import pytest
import torch

from graphcomp.compat.norms import largest_of_each


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_each_has_its_own(dtype: torch.dtype) -> None:
    finite = torch.tensor([[1.0, -3.0], [2.0, 0.0]], dtype=dtype)
    nan, infinite = finite.clone(), finite.t().clone()
    nan[0, 1], infinite[1, 0] = torch.nan, -torch.inf
    found = [value.item() for value in largest_of_each([finite, nan, infinite.t(), finite[0, 0]])]
    assert found[0] == 3 and found[1] != found[1] and found[2] == torch.inf and found[3] == 1


def test_dtypes_may_differ() -> None:
    found = largest_of_each([torch.ones(2, dtype=torch.float16), torch.full((1,), -2.0, dtype=torch.float64)])
    assert [value.item() for value in found] == [1, 2]


def test_none_of_none() -> None:
    assert largest_of_each([]) == []
