"""Assignments that the operators of a trace do not show: of a tensor's `.data` or `.grad`, of what a module registers.

Each is refused where it stands in the user's code: a program without it would compute something else. make_fx has no
public place for such a rule; operators run through this file, so it is none of capture's own, at which lines end.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as registrations

from graphcomp.compat.function_modes import FunctionMode
from graphcomp.compat.modules import own_buffers, own_parameters
from graphcomp.compat.replaced import replaced
from graphcomp.errors import CaptureError, StateError

_DATA, _GRAD = torch.Tensor.data.__set__, torch.Tensor.grad.__set__  # type: ignore[attr-defined, union-attr]
_USE_VALUE = (
    "compute with the new value itself: F.linear(x, w) in place of a layer whose weight was set; a buffer takes it "
    "by copy_ under torch.no_grad()"
)


@contextlib.contextmanager
def unseen_assignments_refused(model: nn.Module) -> Iterator[None]:
    """Within, raises CaptureError or StateError for an assignment that no node would stand for.

    A buffer that is given another tensor is none: its new value is an output of the program.
    """
    names = {id(module): name for name, module in model.named_modules()}
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}

    def registers(module: nn.Module, name: str, value: Any) -> None:
        if id(module) not in names or getattr(module, name, None) is value:
            return
        kind, known = "buffer", name in own_buffers(module)
        if isinstance(value, nn.Module):
            kind, known = "module", name in dict(module.named_children())
            if not any(True for _ in (*value.parameters(), *value.buffers())):
                return
        elif isinstance(value, nn.Parameter) or name in own_parameters(module):
            kind, known = "parameter", name in own_parameters(module)
        elif known:
            return
        raise _rewritten(f"{names[id(module)]}.{name}".lstrip("."), kind, "replaces" if known else "registers")

    handles = (
        registrations.register_module_parameter_registration_hook(registers),
        registrations.register_module_buffer_registration_hook(registers),
        registrations.register_module_module_registration_hook(registers),
    )
    try:
        with _Unseen(), replaced((torch.utils, "swap_tensors", _swap)):
            yield
    finally:
        for handle in handles:
            handle.remove()
    gone = parameters - {name for name, _ in model.named_parameters(remove_duplicate=False)}
    if gone:
        raise _rewritten(min(gone), "parameter", "removes").at(type(model).__name__)


def _rewritten(path: str, kind: str, how: str) -> StateError:
    return StateError(
        f"the model's forward {how} the {kind} '{path}', which a compiled step would not repeat",
        expected="parameters, modules and names of buffers that stay as they were built",
        do="register it in __init__; of a parameter, compute with the new value itself (F.linear(x, w)), or change it "
        "outside of forward",
    )


def _swap(*_: torch.Tensor) -> None:
    raise CaptureError("the code swaps two tensors, which no operation of a program stands for", do=_USE_VALUE)


class _Unseen(FunctionMode):
    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func == _DATA:
            raise CaptureError("the code assigns to x.data, which no operation of a program stands for", do=_USE_VALUE)
        if func == _GRAD and isinstance(args[0], nn.Parameter):
            raise CaptureError(
                "the code assigns to the gradient of a parameter, which a step fills in by itself",
                do="return a loss with that gradient, or change .grad after the step",
            )
        return func(*args, **kwargs)
