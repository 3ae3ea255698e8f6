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
Kinds = tuple[bool, bool, bool]
NOTHING, RANDOM = (False, False, False), (True, False, False)
COLLECTIVE, CHECK = (False, True, False), (False, False, True)
CALLS: list[tuple[Any, Kinds]] = [
    (aten.relu.default, NOTHING),
    (aten.bernoulli.p, RANDOM),
    (c10d.all_reduce.default, COLLECTIVE),
    (c10d.wait_tensor.default, COLLECTIVE),
    (c10d.all_to_all_single.default, COLLECTIVE),
    (c10d.all_reduce_coalesced.default, COLLECTIVE),
    (torch.ops._c10d_functional_autograd.all_to_all_single.default, COLLECTIVE),
    (torch.ops.c10d.allreduce_.default, COLLECTIVE),
    (aten._linalg_check_errors.default, CHECK),
    (aten._foreach_neg_.default, NOTHING),
    (operator.add, NOTHING),
]


def node_of(target: Callable[..., Any]) -> Node:
    return Graph().call_function(target, ())


@pytest.mark.parametrize(("target", "expected"), CALLS, ids=[str(target) for target, _ in CALLS])
def test_kinds(target: Callable[..., Any], expected: Kinds) -> None:
    node = node_of(target)
    assert (effects.is_random(node), effects.is_collective(node), effects.is_check(node)) == expected
    assert effects.is_impure(node) == any(expected)
    if any(expected):
        assert graphcomp.passes.effects.has_effect(node)


def test_there_is_one_definition() -> None:
    assert graphcomp.partition.traits.is_impure is effects.is_impure
    assert graphcomp.passes.effects.is_impure is effects.is_impure
