"""The report of a failure: who, where, why. It lies in the job's store, which is there when connections are gone."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Literal, TypeVar

import torch
import torch.distributed as dist

from graphcomp.compat.process_groups import job_store

Answer = TypeVar("Answer")

Phase = Literal["running", "closing", "writing", "complete"]
"""How far a call has come: no rank writes anything before all have come to the closing exchange."""


@dataclass(frozen=True)
class Report:
    """Why a call of a step did not end.

    cause: "error": something raised; "late": a peer was waited for until the deadline; "lost": a connection broke.
    rank: who says so. where: rank, stage, microbatch and action, or what it did besides. error: type and text.
    call: which call of the step object. phase: how far it had come in that. silent: ranks that had not been heard of.
    """

    cause: Literal["error", "late", "lost"]
    rank: int
    where: str
    error: str
    call: int
    phase: Phase = "running"
    silent: tuple[int, ...] = ()

    def text(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def of(text: str) -> Report:
        fields = json.loads(text)
        return Report(**{**fields, "silent": tuple(fields["silent"])})


class Board:
    """Where the ranks of one step object leave a report, the first of which counts, and say that they have left.

    Made by all ranks of `side` together. The store may be gone with the process that held it: then nothing is read, and
    what is posted is known here only. reachable: False after that has been noticed.
    """

    def __init__(self, side: dist.ProcessGroup) -> None:
        self.rank, self.ranks = dist.get_rank(side), dist.get_world_size(side)
        # A store may outlive a process group, and hold what an earlier life of the job has left.
        name = torch.tensor(list(secrets.token_bytes(8)), dtype=torch.uint8)
        dist.broadcast(name, group=side, group_src=0)
        self.reachable = True
        self._prefix = f"graphcomp/{bytes(name.tolist()).hex()}/"

    def post(self, report: Report) -> Report:
        """The report that counts: this one, unless another rank was first."""
        first = self._ask(lambda store: store.compare_set(f"{self._prefix}report", "", report.text()), None)
        return report if first is None else Report.of(first.decode())

    def read(self) -> Report | None:
        """What has been posted. Waits for nothing."""
        key = f"{self._prefix}report"
        found = self._ask(lambda store: store.get(key) if store.check([key]) else None, None)
        return None if found is None else Report.of(found.decode())

    def sign_off(self) -> None:
        """Say that this rank lives, and has left."""
        self._ask(lambda store: store.set(f"{self._prefix}left/{self.rank}", "left"), None)

    def silent(self) -> tuple[int, ...]:
        """The ranks that have not signed off, as far as can be seen."""
        keys = [f"{self._prefix}left/{rank}" for rank in range(self.ranks)]
        left = self._ask(lambda store: [store.check([key]) for key in keys], [True] * self.ranks)
        return tuple(rank for rank, gone in enumerate(left) if not gone)

    def _ask(self, question: Callable[[dist.Store], Answer], otherwise: Answer) -> Answer:
        try:
            return question(job_store())
        except (RuntimeError, ValueError):  # torch has no error of its own for some stores, or for a missing group
            self.reachable = False
            return otherwise


def ranks_text(ranks: Sequence[int]) -> str:
    """As in "rank 2", "ranks 0, 1 and 2"; empty for none."""
    if not ranks:
        return ""
    *most, last = map(str, ranks)
    return f"ranks {', '.join(most)} and {last}" if most else f"rank {last}"
