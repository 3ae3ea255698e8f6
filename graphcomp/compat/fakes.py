"""Fake results of operators whose kernels take more than torch's own fakes of them, and of those whose fakes take plain
sizes only, though they have a second body. Fakes have no public registry that can be left again."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._meta_registrations import _create_grouped_mm_output_tensor
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from graphcomp.compat import higher_order
from graphcomp.compat.logs import unlogged
from graphcomp.compat.replaced import replaced


def _grouped_mm(
    left: torch.Tensor, right: torch.Tensor, offsets: Any = None, bias: Any = None, out_dtype: Any = None
) -> Any:
    """Kernels multiply single and half precision too; the fake refuses all but bfloat16."""
    if left.dtype not in (torch.float32, torch.float16) or left.dtype != right.dtype or bias is not None:
        return NotImplemented
    return _create_grouped_mm_output_tensor(left, right, offsets, out_dtype)


FAKES: dict[Any, Callable[..., Any]] = {torch.ops.aten._grouped_mm.default: _grouped_mm, **higher_order.FAKES}


def wants_plain_sizes(error: BaseException | None) -> bool:
    """Whether code in C++ that takes sizes as plain numbers was given symbolic ones."""
    return isinstance(error, RuntimeError) and "expected to contain only concrete integers" in str(error)


class TracingMode(FakeTensorMode):
    """A fake mode that knows `FAKES`. Where an operator wants plain sizes, it takes the bodies that do not."""

    supports_higher_order_operators = True

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in FAKES:
            with self:
                found = FAKES[func](*args, **(kwargs or {}))
            if found is not NotImplemented:
                return found
        if isinstance(func, HigherOrderOperator):
            do = "write it out in plain operations"
            raise higher_order.FunctionsRefusedError(func.name(), "which a program cannot hold", do)
        try:
            return super().__torch_dispatch__(func, types, args, kwargs or {})
        except RuntimeError as error:
            if not wants_plain_sizes(error):
                raise
        with enable_python_dispatcher():  # which makes all operators slow, so it is on for those alone that need it
            return super().__torch_dispatch__(func, types, args, kwargs or {})


def second_attempts_unlogged() -> contextlib.AbstractContextManager[None]:
    """Within, torch does not log, with its traceback, that a fake wants plain sizes."""
    return unlogged(
        "torch._subclasses.fake_tensor",
        lambda record: wants_plain_sizes(record.exc_info[1] if record.exc_info else None),
    )


@contextlib.contextmanager
def listed_by(tolist: Callable[[torch.Tensor], Any]) -> Iterator[None]:
    """Within, `tolist` makes the lists of fake tensors, unless it says NotImplemented: torch reads each element for
    itself."""
    separately: Any = FakeTensor.tolist

    def listed(x: torch.Tensor) -> Any:
        found = tolist(x)
        return separately(x) if found is NotImplemented else found

    with replaced((FakeTensor, "tolist", listed)):
        yield
