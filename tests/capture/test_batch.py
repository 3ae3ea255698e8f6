"""How a microbatch is flattened, told apart from others, and passed to a model's forward."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from graphcomp.capture.batch import arguments, batch_key, describe
from graphcomp.errors import BatchError

X = torch.zeros(3, 4)


class Inner(NamedTuple):
    x: Tensor
    mask: Any = None


@pytest.mark.parametrize(
    ("batch", "paths"),
    [
        (X, ["batch"]),
        ((X, X), ["[0]", "[1]"]),
        ({"tokens": X, "labels": X}, ["tokens", "labels"]),
        ({"h": {"aux": Inner(X)}}, ["h.aux.x", "h.aux.mask"]),
        ({"pair": [X, (X,)]}, ["pair[0]", "pair[1][0]"]),
        ({"a.b": X, "a": {"b": X}, 3: X}, ["['a.b']", "a.b", "[3]"]),
        (UserDict(tokens=X), ["tokens"]),
        (OrderedDict(tokens=X), ["tokens"]),
    ],
)
def test_paths_are_readable_and_unique(batch: Any, paths: list[str]) -> None:
    spec, _ = describe(batch)
    assert list(spec.paths) == paths
    assert len(set(spec.paths)) == len(spec.paths)


def test_unflatten_puts_tensors_between_the_plain_leaves() -> None:
    spec, tensors = describe({"a": X, "n": 3, "pair": (X + 1, "s")})
    assert list(tensors) == ["a", "pair[0]"]
    rebuilt = spec.unflatten({"a": "A", "pair[0]": "B"})
    assert rebuilt == {"a": "A", "n": 3, "pair": ("B", "s")}


def key(batch: Any) -> Any:
    return batch_key(batch)[0]


@pytest.mark.parametrize(
    "other",
    [
        {"x": torch.ones(3, 4)},
        {"x": torch.zeros(2, 9)},
    ],
    ids=["contents", "sizes"],
)
def test_contents_and_sizes_select_no_program(other: Any) -> None:
    assert key({"x": X}) == key(other)


@pytest.mark.parametrize(
    "other",
    [
        {"y": X},
        {"x": X, "y": X},
        {"x": X.double()},
        {"x": torch.zeros(1, 4)},
        {"x": torch.zeros(3, 0)},
        {"x": torch.zeros(3, 4, 2)},
        {"x": X.to("meta")},
        {"x": None},
        {"x": [X]},
    ],
    ids=["name", "more", "dtype", "one row", "empty", "rank", "device", "none", "structure"],
)
def test_form_selects_a_program(other: Any) -> None:
    assert key({"x": X}) != key(other)


def test_plain_leaves_select_by_type_and_value() -> None:
    keys = [key({"x": X, "flag": flag}) for flag in (True, False, 1, 1.0, "a", None)]
    assert len(set(keys)) == len(keys)
    assert key({"flag": True}) == key({"flag": True})


def test_keys_keep_the_leaves() -> None:
    _, leaves = batch_key({"x": X, "n": 2})
    assert leaves[0] is X and leaves[1] == 2


def test_unhashable_leaf_is_refused() -> None:
    class Table:
        __hash__ = None  # type: ignore[assignment]

    with pytest.raises(BatchError) as error:
        batch_key({"x": X, "table": Table()})
    assert "the batch holds a Table, which is neither a tensor nor a plain value" in str(error.value)
    assert "where: table" in str(error.value)
    assert "what to do: register its type as a pytree" in str(error.value)


def test_batch_tensor_that_requires_a_gradient_is_refused() -> None:
    with pytest.raises(BatchError, match=r"batch tensor h\.x requires a gradient.*\n.*what to do: detach it"):
        describe({"h": {"x": torch.zeros(2, requires_grad=True)}})


class Tagged(Tensor):
    """Code may ask whether it has one."""


@pytest.mark.parametrize(
    ("leaf", "text"),
    [
        (X.to_sparse(), "the batch tensor h.x is not strided"),
        (torch.nested.nested_tensor([X[0], X[0, :2]], layout=torch.jagged), "got: layout torch.jagged"),
        (X.as_subclass(Tagged), "the batch tensor h.x is of a class of its own"),
    ],
    ids=["sparse", "nested", "subclass"],
)
def test_tensors_of_other_kinds_are_refused_by_name(leaf: Tensor, text: str) -> None:
    assert key({"h": {"x": leaf}}) != key({"h": {"x": X}})
    with pytest.raises(BatchError) as error:
        describe({"h": {"x": leaf}})
    assert text in str(error.value)


def test_lazy_conjugation_and_negation_are_carried_out() -> None:
    numbers = torch.tensor([1 + 2j, 3 - 1j])
    _, tensors = describe({"conj": numbers.conj(), "neg": numbers.conj().imag, "x": X})
    assert not tensors["conj"].is_conj() and tensors["conj"].tolist() == [1 - 2j, 3 + 1j]
    assert not tensors["neg"].is_neg() and tensors["neg"].tolist() == [-2, 1]
    assert tensors["x"] is X


@pytest.mark.parametrize(
    ("part", "strides"),
    [
        (torch.zeros(4, 16)[:1, :8], (8, 1)),
        (torch.zeros(4, 16)[:, :0], (0, 1)),
        (torch.zeros(8, 16)[::8], (16, 1)),
        (torch.zeros(4, 2, 16)[:, :1, :1], (1, 1, 1)),
        (torch.zeros(4, 16)[2:], (16, 1)),
    ],
)
def test_strides_follow_from_the_sizes(part: Tensor, strides: tuple[int, ...]) -> None:
    _, tensors = describe({"x": part})
    assert tensors["x"].stride() == strides and tensors["x"].shape == part.shape


class Takes(nn.Module):
    def forward(self, a: Any, b: Any = None, *, c: Any = None) -> None: ...


class TakesAll(nn.Module):
    def forward(self, *args: Any, **kwargs: Any) -> None: ...


def test_fields_go_to_the_arguments_of_their_names() -> None:
    assert arguments(Takes(), {"a": 1, "c": 3, "labels": 4}) == ((), {"a": 1, "c": 3})
    assert arguments(TakesAll(), {"a": 1, "labels": 4}) == ((), {"a": 1, "labels": 4})


def test_a_tuple_goes_positionally_as_far_as_the_forward_takes() -> None:
    assert arguments(Takes(), (1, 2, 3)) == ((1, 2), {})
    assert arguments(TakesAll(), (1, 2, 3)) == ((1, 2, 3), {})


def test_anything_else_is_the_one_argument() -> None:
    assert arguments(Takes(), 7) == ((7,), {})
    assert arguments(Takes(), [7, 8]) == (([7, 8],), {})


def test_missing_argument_is_named() -> None:
    with pytest.raises(BatchError) as error:
        arguments(Takes(), {"b": 1, "labels": 2})
    for part in ("needs a, which the batch does not hold", "Takes.forward", "a, b, c", "b, labels", "name the batch"):
        assert part in str(error.value)
