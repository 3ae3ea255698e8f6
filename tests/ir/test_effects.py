"""Which calls draw and which communicate is said in one place, and all that must know it ask there."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx import Graph, Node

import graphcomp.partition.traits
import graphcomp.passes.effects
from graphcomp.ir import effects

aten, c10d = torch.ops.aten, torch.ops._c10d_functional
CALLS: list[tuple[Any, tuple[bool, bool]]] = [
    (aten.relu.default, (False, False)),
    (aten.bernoulli.p, (True, False)),
    (c10d.all_reduce.default, (False, True)),
    (c10d.wait_tensor.default, (False, True)),
    (c10d.all_to_all_single.default, (False, True)),
    (c10d.all_reduce_coalesced.default, (False, True)),
    (torch.ops._c10d_functional_autograd.all_to_all_single.default, (False, True)),
    (torch.ops.c10d.allreduce_.default, (False, True)),
    (operator.add, (False, False)),
]


def node_of(target: Callable[..., Any]) -> Node:
    return Graph().call_function(target, ())


@pytest.mark.parametrize(("target", "expected"), CALLS, ids=[str(target) for target, _ in CALLS])
def test_kinds(target: Callable[..., Any], expected: tuple[bool, bool]) -> None:
    node = node_of(target)
    assert (effects.is_random(node), effects.is_collective(node)) == expected
    assert effects.is_impure(node) == any(expected)
    if any(expected):
        assert graphcomp.passes.effects.has_effect(node)


def test_there_is_one_definition() -> None:
    assert graphcomp.partition.traits.is_impure is effects.is_impure
    assert graphcomp.passes.effects.is_impure is effects.is_impure
