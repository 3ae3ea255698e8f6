"""Facts as text: equal for equal things wherever they stand, different where a program would be."""

from __future__ import annotations

import functools
import threading
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from graphcomp.capture.facts import Facts
from graphcomp.capture.spelled import difference, spelled
from graphcomp.capture.values import Watched, freeze

SUBJECT = ("attribute", "", "x")
add_one, add_two = (functools.partial(torch.add, alpha=alpha) for alpha in (1, 2))


def text(value: Any) -> str:
    return spelled(Facts({SUBJECT: freeze(value, Watched())}))[SUBJECT]


def made(source: str) -> Any:
    names: dict[str, Any] = {}
    exec(source, names)
    return names["f"]


def test_code_counts_by_what_it_does_not_by_where_it_stands() -> None:
    one, two = made("def f(x):\n    return x + 1"), made("\n\n\ndef f(x):\n\n    # a comment\n    return x + 1")
    assert text(one) == text(two)
    for other in ("def f(x):\n    return x + 2", "def f(y):\n    return y + 1", "def f(x):\n    return x - 1"):
        assert text(made(other)) != text(one)
    inner = "def f(x):\n    return (lambda y: y * {})(x)"
    assert text(made(inner.format(2))) != text(made(inner.format(3)))


@pytest.mark.parametrize(
    ("one", "two"),
    [
        (1, True),
        (0.0, -0.0),
        ([1, 2], (1, 2)),
        ({"a": 1}, {"a": 2}),
        ({1, 2}, {1, 3}),
        (torch.tanh, torch.sin),
        (torch.float32, torch.float64),
        (SimpleNamespace(a=SimpleNamespace(b=1)), SimpleNamespace(a=SimpleNamespace(b=2))),
        (functools.partial(torch.add, alpha=1), functools.partial(torch.add, alpha=2)),
        (nn.ReLU, nn.GELU),
        (numpy.float32(0.5), numpy.float32(0.25)),
        ([numpy.int64(1)], [numpy.int64(2)]),
        (Fraction(1, 2), Fraction(1, 3)),
        (range(3), range(4)),
        (b"a" * 100, b"a" * 99 + b"b"),
        (SimpleNamespace(a=SimpleNamespace(f=add_one)), SimpleNamespace(a=SimpleNamespace(f=add_two))),
        (torch.zeros(2), None),
    ],
)
def test_what_differs_reads_differently(one: Any, two: Any) -> None:
    assert text(one) == text(one) != text(two)
    assert " at 0x" not in text(one) + text(two)


@pytest.mark.parametrize("make", [torch.Generator, threading.Lock, object])
def test_what_nobody_can_tell_apart_counts_by_its_class(make: Any) -> None:
    one, two = make(), make()
    if isinstance(two, torch.Generator):
        two.manual_seed(3)
    assert text(one) == text(two)


def test_a_loop_of_objects_ends() -> None:
    one, two = SimpleNamespace(), SimpleNamespace()
    one.other, two.other = two, one
    assert text(one) == text(two)


def test_differences_are_short_and_name_the_place() -> None:
    old, new = {SUBJECT: "int 1", ("mode", "a", ""): "True"}, {SUBJECT: "int 2", ("mode", "a", ""): "False"}
    assert difference(old, new, lambda kind: kind != "mode") == ["attribute 'x': was int 1, is int 2"]
    long = "a" * 100
    (line,) = difference({SUBJECT: long + "b"}, {SUBJECT: long + "c"}, lambda _: True)
    assert line == f"attribute 'x': was ...{'a' * 20}b..., is ...{'a' * 20}c..."
    (line,) = difference({}, {SUBJECT: long}, lambda _: True)
    assert line == f"attribute 'x': was nothing, is {'a' * 80}..."
