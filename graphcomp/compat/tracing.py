"""Tracing. make_fx has no public way to see nodes while they are made, nor to swap state into a module untouched."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot, make_fx
from torch.nn.utils.stateless import _reparametrize_module

from graphcomp.compat.closures import TakeFunctions, as_written_by_the_user
from graphcomp.compat.fakes import second_attempts_unlogged
from graphcomp.compat.operators import OpOverload
from graphcomp.compat.symbolic_sizes import SymbolicSizes, sizes_in_text, whole_numbers


@contextlib.contextmanager
def observe_nodes(observer: Callable[[Node], None]) -> Iterator[None]:
    """Within, `observer` is called with each node that the active make_fx tracer makes, at the moment it is made."""
    tracer: Any = get_proxy_mode().tracer  # type: ignore[union-attr]
    original = tracer.create_node

    def create_node(*args: Any, **kwargs: Any) -> Node:
        node: Node = original(*args, **kwargs)
        observer(node)
        return node

    tracer.create_node = create_node
    try:
        yield
    finally:
        del tracer.create_node


def node_of(tensor: torch.Tensor) -> Node | None:
    """The node that computes a tensor in the trace under way; None outside of one, or for what comes from elsewhere."""
    mode = get_proxy_mode()
    found = None if mode is None else get_proxy_slot(tensor, mode.tracer, None)
    return None if found is None else found.proxy.node


def next_sequence_number() -> int:
    """The number that the next autograd node of this thread gets."""
    return torch.autograd._get_sequence_nr()


def sequence_number(function: Any) -> int:
    """The number an autograd node got; backward nodes find their forward nodes by it."""
    return int(function._sequence_nr())


def swapped_state(model: nn.Module, state: Mapping[str, torch.Tensor]) -> contextlib.AbstractContextManager[None]:
    """Run `model` with other tensors in the place of its parameters and buffers; tied names follow one another.

    stack_weights: put back in reverse order, or a module that is registered under two names keeps the others.
    """
    return _reparametrize_module(model, dict(state), tie_weights=True, stack_weights=True)


@contextlib.contextmanager
def _no_fused_attention() -> Iterator[None]:
    """Attention layers in eval mode take, for padded batches, a fused path on nested tensors, which has no fakes."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def trace(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    is_user_file: Callable[[str], bool] = lambda _: False,
    rules: Mapping[OpOverload, Callable[..., Any]] | None = None,
    functions: Mapping[Callable[..., Any], Callable[..., Any]] | None = None,
) -> GraphModule:
    """make_fx over fake arguments (nested sequences of fake tensors), without decompositions.

    is_user_file: the source files whose code gets plain numbers where it makes a text of a size.
    rules: what is done in place of operators; NotImplemented for one that stays as it is.
    functions: what is called in place of functions, above autograd.
    """
    sizes = (SymbolicSizes(functions or {}), second_attempts_unlogged(), whole_numbers(), sizes_in_text(is_user_file))
    with contextlib.ExitStack() as stack:
        for context in (*sizes, _no_fused_attention(), as_written_by_the_user(), TakeFunctions()):
            stack.enter_context(context)
        return make_fx(function, dict(rules or {}), tracing_mode="real", _allow_non_fake_inputs=True)(*arguments)
