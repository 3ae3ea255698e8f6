"""Where sizes would stop being symbolic too early, or, in a text, would stay it too long.

There are functions whose C++ body, or that of their backward, reads sizes as plain numbers. That would tie a program
to the sizes of the example. PyTorch has second bodies in Python, which keep sizes symbolic, and takes them only under
its Python dispatcher, which has no public name. It makes tracing two to three times as slow, so it is on only from
the first such function to the end of a trace, where the backward is.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch._dispatch.python import enable_python_dispatcher
from torch.fx.experimental import proxy_tensor
from torch.utils._pytree import tree_leaves

from graphcomp.compat.function_modes import FunctionMode
from graphcomp.compat.replaced import replaced

_TRANSFORMS = [(inverse, kind, form) for inverse in ("", "i") for kind in ("", "r", "h") for form in ("", "2", "n")]

CONCRETE = frozenset(
    {
        F.pad,
        F.interpolate,
        F.upsample,
        F.unfold,
        F.bilinear,
        torch.bilinear,
        torch.trace,
        torch.Tensor.trace,
        torch.diag,
        torch.Tensor.diag,
        torch.linalg.pinv,
        torch.pinverse,
        torch.Tensor.pinverse,
        *(getattr(torch.fft, f"{inverse}{kind}fft{form}") for inverse, kind, form in _TRANSFORMS),
        torch.lstm,
        torch.gru,
        torch.rnn_tanh,
        torch.rnn_relu,
    }
)


_NUMBERS: dict[type, Callable[[Any], Any]] = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}


_MISSING: dict[str, Callable[..., Any]] = {
    "__divmod__": lambda size, other: (size // other, size % other),
    "__rdivmod__": lambda size, other: (other // size, other % size),
    "__invert__": lambda size: -size - 1,
}
"""What an int can do and a symbolic one cannot."""


@contextlib.contextmanager
def whole_numbers() -> Iterator[None]:
    """Within, symbolic sizes can do all that ints can, and one that has turned out to be a number goes as one."""
    added = [name for name in _MISSING if not hasattr(torch.SymInt, name)]
    for name in added:
        setattr(torch.SymInt, name, _MISSING[name])
    try:
        with replaced((proxy_tensor, "_compute_proxy", _computed(proxy_tensor._compute_proxy))):
            yield
    finally:
        for name in added:
            delattr(torch.SymInt, name)


def _computed(original: Callable[..., Any]) -> Callable[..., Any]:
    """The tracer's way to make a node of a number that is computed. It knows no node of a number that is a constant by
    now, such as the last size of a view of sizes (n * 1, -1)."""

    def known(number: Any) -> Any:
        if isinstance(number, tuple | list):
            return type(number)(map(known, number))
        return int(number) if isinstance(number, torch.SymInt) and number.node.expr.is_Integer else number

    def computed(tracer: Any, func: Any, args: Any, out: Any) -> Any:
        return original(tracer, func, known(args), out)

    return computed


@contextlib.contextmanager
def sizes_in_text(asks: Callable[[str], bool]) -> Iterator[None]:
    """Within, a symbolic number of which code in certain files makes a text becomes a plain number, and its own guard.

    asks: whether a source file counts. Such code would else get the name of a symbol, say nothing, and decide on it.
    torch itself has no hook here, and prints symbols in messages of its own, which stay as they are.
    """
    before: list[tuple[Any, Any]] = [(kind, kind.__repr__) for kind in _NUMBERS]
    for kind, spelled in before:
        kind.__repr__, kind.__format__ = _text_of(_NUMBERS[kind], spelled, asks)
    try:
        yield
    finally:
        for kind, spelled in before:
            kind.__repr__ = spelled
            del kind.__format__


def _text_of(number: Callable[[Any], Any], spelled: Callable[[Any], str], asks: Callable[[str], bool]) -> Any:
    def represent(self: Any) -> str:
        return repr(number(self)) if asks(sys._getframe(1).f_code.co_filename) else spelled(self)

    def represent_as(self: Any, form: str) -> str:
        plain = asks(sys._getframe(1).f_code.co_filename)
        return format(number(self), form) if plain else format(spelled(self), form)

    return represent, represent_as


@contextlib.contextmanager
def symbolic_bodies() -> Iterator[None]:
    """Within, operations on fake tensors take the bodies that keep sizes symbolic."""
    with enable_python_dispatcher(), torch.no_grad():
        yield


class SymbolicSizes(FunctionMode):
    """Around a whole trace: the functions above keep symbolic sizes symbolic. instead: what is called for others."""

    def __init__(self, instead: Mapping[Callable[..., Any], Callable[..., Any]]) -> None:
        super().__init__()
        self._instead = instead
        self._rest_of_trace = contextlib.ExitStack()

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func in self._instead:
            return self._instead[func](*args, **kwargs)
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
