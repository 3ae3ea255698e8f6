"""How torch.utils.checkpoint finds its implementations: what the swap relies on."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import checkpoint as checkpoints
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from graphcomp.compat.checkpointed import AskPolicy, checkpointed_regions, selective_policy


def ran(use_reentrant: bool, **options: Any) -> list[str]:
    """What happens when a checkpointed function runs and its gradient is computed."""
    said: list[str] = []

    @contextlib.contextmanager
    def enter(context_fn: Any) -> Iterator[None]:
        said.append("in")
        yield
        said.append("out")

    def function(x: Tensor) -> Tensor:
        said.append("run")
        return x.sin()

    x = torch.ones(2, requires_grad=True)
    with checkpointed_regions(enter):
        result = checkpoint(function, x, use_reentrant=use_reentrant, **options)
        (gradient,) = torch.autograd.grad(result.sum(), x)
    assert torch.equal(gradient, x.detach().cos())
    return said


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_function_runs_once_within_its_region(use_reentrant: bool) -> None:
    before = dict(vars(checkpoints))
    assert ran(use_reentrant) == ["in", "run", "out"]
    assert dict(vars(checkpoints)) == before


def test_the_composable_form_too() -> None:
    from torch.distributed._composable import checkpoint as composable  # what the shim looks for among the modules

    runs = []
    layer = torch.nn.Linear(2, 2)
    layer.register_forward_pre_hook(lambda module, inputs: runs.append("run"))
    composable(layer)
    with checkpointed_regions(lambda context_fn: contextlib.nullcontext()):
        torch.autograd.grad(layer(torch.ones(1, 2)).sum(), layer.weight)
    assert runs == ["run"]


def test_a_reentrant_region_that_is_given_no_gradient_has_none() -> None:
    weight = torch.ones(2, requires_grad=True)

    def function(x: Tensor) -> Tensor:
        return x * weight

    with pytest.warns(UserWarning, match="None of the inputs"):
        expected = checkpoint(function, torch.ones(2), use_reentrant=True)
        with checkpointed_regions(lambda context_fn: contextlib.nullcontext()):
            result = checkpoint(function, torch.ones(2), use_reentrant=True)
    assert not expected.requires_grad and not result.requires_grad


def test_without_gradients_there_is_no_region() -> None:
    def enter(context_fn: Any) -> Any:
        raise RuntimeError("a region was opened")

    with checkpointed_regions(enter), torch.no_grad():
        for use_reentrant in (True, False):
            checkpoint(torch.sin, torch.ones(2), use_reentrant=use_reentrant)


def test_the_policy_of_a_selective_context_is_found_and_asked() -> None:
    contexts = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
    policy = selective_policy(contexts)
    assert policy is not None
    answers: list[Any] = []
    x = torch.ones(2, 2)
    with AskPolicy(policy, answers.append):
        torch.mm(x, x).sin()
    assert answers == [CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE]
    assert selective_policy(checkpoints.noop_context_fn) is None
    with pytest.raises(TypeError):
        selective_policy(lambda: (contextlib.suppress(OSError), contextlib.nullcontext()))
