"""Lines that torch would log and that tell nobody anything. Its loggers go by the names of its modules."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def unlogged(logger: str, is_noise: Callable[[logging.LogRecord], bool]) -> Iterator[None]:
    """Within, a logger leaves these records out."""

    def is_worth_a_line(record: logging.LogRecord) -> bool:
        return not is_noise(record)

    log = logging.getLogger(logger)
    log.addFilter(is_worth_a_line)
    try:
        yield
    finally:
        log.removeFilter(is_worth_a_line)
