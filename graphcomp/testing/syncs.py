"""Counting what makes the host wait for a device: to show that a steady step does not."""

from __future__ import annotations

import inspect
from collections import Counter
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from graphcomp.compat import dispatch

READS = frozenset(
    {
        "aten::_local_scalar_dense", "aten::item", "aten::is_nonzero", "aten::equal", "aten::allclose",
        "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive",
        "aten::_assert_async", "graphcomp::exchange_splits", "graphcomp::read_numbers",
        "graphcomp::read_sum",
    }
)  # fmt: skip
"""Operators that read values back, or whose result's size depends on values: on a device the host waits for both."""
LOOKS_UP = frozenset({"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"})
"""With a mask for an index these count its elements on the host."""
COPIES = frozenset({"aten::_to_copy", "aten::copy_"})
_MASKS = (torch.bool, torch.uint8)
_TORCH = str(Path(torch.__file__).parent) + "/"


class HostSyncs:
    """Within, counts what makes the host wait for a device, also where all tensors are on the CPU.

        with HostSyncs() as syncs:
            step(microbatches)
            gc.clip_grad_norm_(step, 1.0)
            optimizer.step()
        assert not syncs.found, syncs

    Counted are operators that read values back (`.item()`, `if tensor:`, `nonzero`, ...), blocking copies from a device
    to the host, and calls of `synchronize`. found: how often, by what it was and the line of code it came from.
    """

    def __init__(self) -> None:
        self.found: Counter[str] = Counter()
        self._watch = dispatch.WatchCalls(self._see)
        self._originals: dict[str, Any] = {}

    def __enter__(self) -> HostSyncs:
        for name in ("cuda", "accelerator"):
            module = getattr(torch, name)
            self._originals[name] = module.synchronize
            module.synchronize = self._counted(f"torch.{name}.synchronize", module.synchronize)
        self._watch.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watch.__exit__(kind, error, trace)
        for name, original in self._originals.items():
            getattr(torch, name).synchronize = original

    def __str__(self) -> str:
        return "\n".join(f"{count} x {what}" for what, count in self.found.most_common()) or "no host synchronisation"

    def _see(self, operator: Any, arguments: tuple[Any, ...], result: Any) -> None:
        name = operator.name().partition(".")[0]
        counts = name in LOOKS_UP and any(x is not None and x.dtype in _MASKS for x in arguments[1])
        if name in READS or counts or (name in COPIES and _brings_to_host(arguments, result)):
            self._note(name)

    def _counted(self, name: str, original: Any) -> Any:
        def synchronize(*args: Any, **options: Any) -> Any:
            self._note(name)
            return original(*args, **options)

        return synchronize

    def _note(self, what: str) -> None:
        self.found[f"{what} at {_line()}"] += 1


def _line() -> str:
    """The innermost line of code that is neither torch's nor ours for watching."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.startswith((_TORCH, __file__, dispatch.__file__)):
        frame = frame.f_back
    return "an unknown line" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _brings_to_host(arguments: tuple[Any, ...], result: Any) -> bool:
    """A copy whose source is on a device and whose target is not. One that does not block is counted too: somebody has
    to wait in order to use its result."""
    sources = [value for value in arguments if isinstance(value, torch.Tensor)]
    return result.device.type == "cpu" and any(source.device.type not in ("cpu", "meta") for source in sources)
