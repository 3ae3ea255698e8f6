"""What all ranks do together between steps: an error on one of them is an error on all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from graphcomp.runtime.failures.failure import Failures, Progress
from graphcomp.runtime.ranks.agreement import Agreement

Result = TypeVar("Result")


@dataclass(frozen=True)
class Together:
    """require_usable: raises if an earlier failure has ended it all."""

    agreement: Agreement
    failures: Failures
    progress: Progress
    require_usable: Callable[[], None]

    def look(self, what: str, work: Callable[[], Result], alike: str = "") -> Result:
        """What `work` returns, which changes nothing; if it raises, all ranks raise, and the step may be used on.

        what: completes "rank 1 could not ...". alike: what must be the same on all ranks.
        """
        self.require_usable()
        self.progress.begin(f"about to {what}")
        return self.failures.guarded(lambda: self._look(what, work, alike), self.agreement.known)

    def do(self, doing: str, work: Callable[[], Result]) -> Result:
        """What `work` returns. If it raises, all ranks raise, and the step is done with."""
        self.require_usable()
        self.progress.begin(doing)
        self.progress.come_to("closing", doing)  # one rank may have done it when another fails
        return self.failures.guarded(work)

    def _look(self, what: str, work: Callable[[], Result], alike: str) -> Result:
        try:
            found = work()
        except Exception as error:
            self.agreement.share("", error, what)
            raise
        self.agreement.share("", None, what)
        self.agreement.alike({what: alike})
        return found
