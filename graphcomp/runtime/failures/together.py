"""What all ranks do together between steps: an error on one of them is an error on all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from graphcomp.errors import GraphcompError, RankFailure
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

    def look(
        self,
        what: str,
        work: Callable[[], Result],
        alike: str = "",
        refusal: type[GraphcompError] = RankFailure,
    ) -> Result:
        """What `work` returns, which changes nothing; if it raises, all ranks raise, and the step may be used on.

        what: completes "rank 1 could not ...". alike: what must be the same on all ranks. refusal: the error of `work`
        that is of one kind on all ranks, so that each of them can catch it and go on in the same way.
        """
        self.require_usable()
        self.progress.begin(f"about to {what}")
        return self.failures.guarded(lambda: self._look(what, work, alike, refusal), self.agreement.known)

    def do(self, doing: str, work: Callable[[], Result]) -> Result:
        """What `work` returns. If it raises, all ranks raise, and the step is done with."""
        self.require_usable()
        self.progress.begin(doing)
        self.progress.come_to("closing", doing)  # one rank may have done it when another fails
        return self.failures.guarded(work)

    def _look(self, what: str, work: Callable[[], Result], alike: str, refusal: type[GraphcompError]) -> Result:
        try:
            found = work()
        except Exception as error:
            self.agreement.share("", error, what)
            raise
        try:
            self.agreement.share("", None, what)
        except RankFailure as other:
            if not str(other.got).startswith(f"{refusal.__name__}: "):
                raise
            raise self.agreement.told(refusal(other.what, where=other.where, got=other.got)) from None
        self.agreement.alike({what: alike})
        return found
