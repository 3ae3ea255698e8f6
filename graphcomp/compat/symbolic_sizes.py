"""Functions whose C++ body, or that of their backward, reads sizes as plain numbers.

That would tie a program to the sizes of the example. PyTorch has second bodies in Python, which keep
sizes symbolic, and takes them only under its Python dispatcher, which has no public name. It makes
tracing two to three times as slow, so it is on only from the first such function to the end of a
trace, where the backward is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch._dispatch.python import enable_python_dispatcher
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

CONCRETE = frozenset(
    {
        F.pad,
        F.interpolate,
        F.upsample,
        F.unfold,
        F.bilinear,
        torch.bilinear,
        torch.baddbmm,
        torch.Tensor.baddbmm,
        torch.lstm,
        torch.gru,
        torch.rnn_tanh,
        torch.rnn_relu,
    }
)


@contextlib.contextmanager
def symbolic_bodies() -> Iterator[None]:
    """Within, operations on fake tensors take the bodies that keep sizes symbolic."""
    with enable_python_dispatcher(), torch.no_grad():
        yield


class SymbolicSizes(TorchFunctionMode):
    """Around a whole trace: the functions above keep symbolic sizes symbolic."""

    def __init__(self) -> None:
        super().__init__()
        self._rest_of_trace = contextlib.ExitStack()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func not in CONCRETE:
            return func(*args, **kwargs)
        if any(isinstance(x, torch.Tensor) and x.requires_grad for x in tree_leaves((args, kwargs))):
            self._rest_of_trace.enter_context(enable_python_dispatcher())
        if func is torch.lstm and torch.is_grad_enabled() and not args[0].requires_grad:
            # Else the second body takes a kernel that keeps what its backward needs only if autograd sees it.
            args = (args[0].detach().requires_grad_(), *args[1:])
        with enable_python_dispatcher():
            return func(*args, **kwargs)

    def __exit__(self, *error: Any) -> None:
        self._rest_of_trace.close()
        super().__exit__(*error)
