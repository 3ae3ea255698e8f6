"""The form check of torch's compiler notices all that a program depends on in a tensor that stays the same object."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils import swap_tensors

from graphcomp.compat.tensor_forms import form_check


def replace_by(make: Callable[[Tensor], Tensor]) -> Callable[[Tensor], None]:
    return lambda tensor: setattr(tensor, "data", make(tensor.detach()))


CHANGES: dict[str, Callable[[Tensor], object]] = {
    "dtype": replace_by(Tensor.double),
    "shape": replace_by(lambda tensor: tensor[:2]),
    "number of dimensions": replace_by(lambda tensor: tensor.reshape(-1)),
    "strides": replace_by(lambda tensor: tensor.t().contiguous().t()),
    "strides in the same memory": replace_by(lambda tensor: tensor.as_strided((3, 3), (1, 3))),
    "gradient": lambda tensor: tensor.requires_grad_(False),
    "class": lambda tensor: swap_tensors(tensor, nn.Parameter(torch.ones(3, 3)).as_subclass(Other)),
}


class Other(Tensor):
    pass


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_is_noticed(change: Callable[[Tensor], object]) -> None:
    tensors = [nn.Parameter(torch.ones(3, 3)) for _ in range(3)]
    same = form_check(tensors)
    assert same()
    change(tensors[1])
    assert not same()
    assert form_check(tensors)()


def test_contents_and_memory_do_not_matter() -> None:
    tensors = [nn.Parameter(torch.ones(3, 3))]
    same = form_check(tensors)
    with torch.no_grad():
        tensors[0].add_(1)
        tensors[0].data = torch.zeros(3, 3)
        assert same()


def test_the_device_is_noticed() -> None:
    model = nn.Linear(2, 2)
    same = form_check([model.weight])
    swap_tensors(model.weight, nn.Parameter(torch.empty(2, 2, device="meta")))
    assert not same()


def test_no_tensors() -> None:
    assert form_check([])()
