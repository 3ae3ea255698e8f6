"""Holds signals back while something runs that must be done as a whole."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

_HELD = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1", "SIGALRM") if hasattr(signal, name)]


@contextlib.contextmanager
def signals_held() -> Iterator[None]:
    """Python handlers of SIGINT (Ctrl-C), SIGTERM, SIGUSR1 and SIGALRM, which may raise, are called behind the block.

    Python calls them in the main thread only; in another thread there is nothing to hold. What a signal does without a
    Python handler, it does at once.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: handler for number in _HELD if callable(handler := signal.getsignal(number))}
    came: list[tuple[int, FrameType | None]] = []
    try:
        for number in handlers:
            signal.signal(number, lambda *given: came.append(given))
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for number, frame in came:
            handlers[number](number, frame)
