"""Progress of long work, on the terminal: capture, and the compile of each stage program."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from rich.console import Console


class Progress:
    """Prints a line when a piece of long work is done, and shows what runs meanwhile where a terminal can.

    quiet: print nothing. rank: printed before each line if there are several ranks.
    """

    def __init__(self, quiet: bool = False, rank: int | None = None) -> None:
        self.quiet = quiet
        self._console = Console(stderr=True, highlight=False)
        self._prefix = "" if rank is None else f"rank {rank}: "

    @contextlib.contextmanager
    def work(self, doing: str, done: str) -> Iterator[None]:
        """Around one piece of work: `doing` while it runs, `done` with the seconds afterwards."""
        if self.quiet:
            yield
            return
        began = time.perf_counter()
        status = self._console.status(f"{self._prefix}{doing} ...") if self._console.is_terminal else None
        with status or contextlib.nullcontext():
            yield
        self.say(f"{done} in {time.perf_counter() - began:.1f} s")

    def say(self, text: str) -> None:
        if not self.quiet:
            self._console.print(f"graphcomp: {self._prefix}{text}", markup=False, soft_wrap=True)
