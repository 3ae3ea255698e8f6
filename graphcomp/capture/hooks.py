"""Hooks on gradients: what they return is traced and becomes part of the program, microbatch by microbatch.

A hook runs while tracing and never again. So one that returns nothing, and was there for what it does besides, is
refused.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from graphcomp.capture.labels import Labels, user_line
from graphcomp.compat import modules as internals
from graphcomp.errors import StateError

Hook = Callable[..., Any]


def check_hooks(model: nn.Module) -> None:
    """Refuse hooks on parameters that a program cannot hold."""
    for name, parameter in model.named_parameters():
        if internals.accumulate_hooks_of(parameter):
            raise _runs_behind_backward(f"parameter '{name}' of {type(model).__name__}")
        if internals.hooks_of(parameter) and isinstance(parameter, DTensor):
            raise StateError(
                f"parameter '{name}' has a gradient hook and lies on several ranks, each of which has a part of it",
                where=type(model).__name__,
                do="remove the hook and change the gradient in .grad after the step",
            )


@contextlib.contextmanager
def traced_hooks(model: nn.Module, labels: Labels, leaves: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Within, hooks of the model, of its parameters and of tensors in forward run as in eager, each once.

    leaves: what stands for the parameters while tracing. Model and torch are as before afterwards.
    """
    register = torch.Tensor.register_hook

    def traced(hook: Hook, where: str) -> Hook:
        @functools.wraps(hook, assigned=("__name__", "__doc__"), updated=())
        def run(*gradients: Any) -> Any:
            outer, labels.hook = labels.hook, True
            try:
                result = hook(*gradients)
            finally:
                labels.hook = outer
            if result is None:
                raise _only_looks(hook, where)
            return result

        return run

    def register_hook(tensor: torch.Tensor, hook: Hook) -> Any:
        return register(tensor, traced(hook, f"a tensor in forward, {user_line(sys._getframe(1))}"))

    def refuse(tensor: torch.Tensor, hook: Hook) -> Any:
        raise _runs_behind_backward(user_line(sys._getframe(1)) or "a tensor in forward")

    with contextlib.ExitStack() as stack:
        for name, module in model.named_modules():
            for table in internals.backward_hook_tables(module):
                stack.enter_context(_exchanged(table, functools.partial(traced, where=f"module '{name}'")))
        for table in internals.global_backward_hook_tables():
            stack.enter_context(_exchanged(table, functools.partial(traced, where="all modules")))
        for name, parameter in model.named_parameters():
            for hook in dict(internals.hooks_of(parameter) or {}).values():
                if leaves[name].requires_grad:
                    register(leaves[name], traced(hook, f"parameter '{name}'"))
        for name, own in (("register_hook", register_hook), ("register_post_accumulate_grad_hook", refuse)):
            stack.callback(setattr, torch.Tensor, name, getattr(torch.Tensor, name))
            setattr(torch.Tensor, name, own)
        yield


@contextlib.contextmanager
def _exchanged(table: MutableMapping[Any, Hook], exchange: Callable[[Hook], Hook]) -> Iterator[None]:
    """Within, each entry of a table is exchanged for another, in place."""
    before = dict(table)
    for key, hook in before.items():
        table[key] = exchange(hook)
    try:
        yield
    finally:
        for key, hook in before.items():
            if key in table:  # a hook may remove itself
                table[key] = hook


def _only_looks(hook: Hook, where: str) -> StateError:
    name = getattr(hook, "__qualname__", type(hook).__name__)
    return StateError(
        f"the gradient hook '{name}' returns nothing, so a compiled step would not repeat what it does",
        where=where,
        expected="a hook that returns the gradient that is to be used",
        got="None",
        do="return the gradient; to look at gradients, read .grad after the step",
    )


def _runs_behind_backward(where: str) -> StateError:
    return StateError(
        "a hook is to run each time a gradient was added to .grad, which a step does once, for all microbatches",
        where=where,
        expected="no post-accumulate gradient hooks",
        do="remove it and do its work after the step, for each of step.named_parameters()",
    )
