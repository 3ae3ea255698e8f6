"""Whether a profiler is recording, which has no public name. Asking costs nothing, opening a range does."""

from __future__ import annotations

import contextlib

from torch.autograd import profiler


def is_recording() -> bool:
    """Whether a torch profiler (or `emit_nvtx`, `emit_itt`) is on in this process."""
    return bool(profiler._is_profiler_enabled)


def span(name: str) -> contextlib.AbstractContextManager[object]:
    """A range in the trace of a profiler, if one is on."""
    return profiler.record_function(name) if is_recording() else _NOTHING


_NOTHING = contextlib.nullcontext()
