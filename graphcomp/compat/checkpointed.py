"""Regions under torch.utils.checkpoint. `checkpoint` has no public way to be told to run its function plainly, once.

It looks its two implementations up among its module's names, where others stand for as long as a trace lasts. The
composable form, which works by hooks, holds one of them under a name of its own.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils import checkpoint as checkpoints
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext, _CachingTorchDispatchMode

ContextFunction = Callable[[], tuple[Any, Any]]
Enter = Callable[[ContextFunction], contextlib.AbstractContextManager[None]]
"""Opens a region, given the user's `context_fn`."""

_GENERATOR, _FUNCTION = "_checkpoint_without_reentrant_generator", "CheckpointFunction"
_COMPOSABLE = "torch.distributed._composable.checkpoint_activation"

SAVED = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)
OFFLOADED = (CheckpointPolicy.MUST_CPU_OFFLOAD, CheckpointPolicy.PREFER_CPU_OFFLOAD)


@contextlib.contextmanager
def checkpointed_regions(enter: Enter) -> Iterator[None]:
    """Within, a checkpointed function runs once, in a region, and its backward is that of its operations.

    Where eager detaches (without a gradient to compute; a reentrant region none of whose inputs requires one), so does
    this.
    """

    def region(context_fn: ContextFunction) -> contextlib.AbstractContextManager[None]:
        return enter(context_fn) if torch.is_grad_enabled() else contextlib.nullcontext()

    def generator(
        _function: Any,
        _preserve: Any = True,
        context_fn: ContextFunction = checkpoints.noop_context_fn,
        *_: Any,
        **__: Any,
    ) -> Iterator[None]:
        with region(context_fn):
            yield

    class Reentrant:
        @staticmethod
        def apply(function: Callable[..., Any], _preserve: bool, *args: Any) -> Any:
            with region(checkpoints.noop_context_fn), contextlib.ExitStack() as stack:
                given = any(isinstance(argument, torch.Tensor) and argument.requires_grad for argument in args)
                if torch.is_grad_enabled() and not given:
                    checkpoints.check_backward_validity(args)  # which warns, as eager does
                    stack.enter_context(torch.no_grad())
                return function(*args)

    swapped = [(checkpoints, _GENERATOR, generator), (checkpoints, _FUNCTION, Reentrant)]
    if _COMPOSABLE in sys.modules:
        swapped.append((sys.modules[_COMPOSABLE], _GENERATOR, generator))
    before = [(module, name, getattr(module, name)) for module, name, _ in swapped]
    for module, name, own in swapped:
        setattr(module, name, own)
    try:
        yield
    finally:
        for module, name, original in before:
            setattr(module, name, original)


def selective_policy(context_fn: ContextFunction) -> Callable[..., Any] | None:
    """The policy behind a `context_fn` that saves selectively; None where it does nothing to the forward.

    Raises TypeError for a context of another kind.
    """
    if context_fn is checkpoints.noop_context_fn:
        return None
    context, _ = context_fn()
    if isinstance(context, contextlib.nullcontext):
        return None
    if not isinstance(context, _CachingTorchDispatchMode):
        raise TypeError(type(context).__name__)
    return context.policy_fn


class AskPolicy(TorchDispatchMode):
    """Within, a policy is asked about each operation, as `create_selective_checkpoint_contexts` does.

    decided: called with the answer right behind each operation; None for one that it is not asked about.
    """

    supports_higher_order_operators = True

    def __init__(self, policy: Callable[..., Any], decided: Callable[[CheckpointPolicy | None], None]) -> None:
        super().__init__()
        self._policy, self._decided = policy, decided

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        answer = None
        if func not in checkpoints.SAC_IGNORED_OPS:
            context = SelectiveCheckpointContext(is_recompute=False, op_output=result)
            answer = self._policy(context, func, *args, **(kwargs or {}))
            if isinstance(answer, bool):
                answer = CheckpointPolicy.MUST_SAVE if answer else CheckpointPolicy.PREFER_RECOMPUTE
        self._decided(answer)
        return result
