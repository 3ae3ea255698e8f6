"""Watching operators as they are dispatched, below autograd. The mode class has no public name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["BeforeCalls", "Watch", "WatchCalls"]


class WatchCalls(TorchDispatchMode):
    """Within, `observer(operator, arguments, result)` is called after each operator that runs."""

    supports_higher_order_operators = True

    def __init__(self, observer: Callable[[Any, tuple[Any, ...], Any], None]) -> None:
        super().__init__()
        self.observer = observer

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.observer(func, args, result)
        return result


class Watch(WatchCalls):
    """Within, `observer(operator, result)` is called after each operator that runs."""

    def __init__(self, observer: Callable[[Any, Any], None]) -> None:
        super().__init__(lambda operator, _, result: observer(operator, result))


class BeforeCalls(TorchDispatchMode):
    """Within, `observer(operator, arguments, keyword arguments)` is called before each operator that runs."""

    supports_higher_order_operators = True

    def __init__(self, observer: Callable[[Any, tuple[Any, ...], dict[str, Any]], None]) -> None:
        super().__init__()
        self.observer = observer

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.observer(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))
