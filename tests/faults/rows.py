"""The matrix: what happens, on which rank, in which step, and what is said of it. docs/errors.md has it in words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Row:
    """place, number, what: of the trap, on `rank`. where: what the error says of the place, without the rank's number.

    later: after a good step. shard: parameters are sharded over data ranks.
    """

    place: str
    rank: int
    where: str
    number: int = 1
    what: Literal["raise", "interrupt", "kill", "stall", "other batch", "gradient"] = "raise"
    pp: int = 3
    dp: int = 1
    later: bool = False
    shard: bool = False

    @property
    def stage(self) -> int:
        return self.rank // self.dp  # the mesh is pp x dp

    @property
    def error(self) -> str:
        """The type on the rank where it happens."""
        return {"interrupt": "KeyboardInterrupt", "stall": "RankFailure", "gradient": "StateError"}.get(
            self.what, "Injected"
        )

    @property
    def text(self) -> str:
        """Where it happened, as every rank says it."""
        return f"rank {self.rank}, stage {self.stage}, {self.where}"

    def __str__(self) -> str:
        what = "" if self.what == "raise" else f"{self.what} "
        layout = f"{self.pp}x{self.dp}{'s' if self.shard else ''}"
        return f"{what}{self.place} on rank {self.rank} of {layout}{' later' if self.later else ''}".replace("  ", " ")


SQUARE = {"pp": 2, "dp": 2}

ROWS = (
    # While tracing: a step object that all ranks may go on using.
    Row("trace", 0, "microbatch 0"),
    Row("trace", 2, "microbatch 0", later=True),
    Row("trace", 3, "microbatch 0", **SQUARE),
    Row("trace", 1, "preparing the step, microbatch 0", what="interrupt", later=True),
    # What ranks compare before a step.
    Row("compare", 1, "preparing the step", later=True),
    Row("compare", 2, "preparing the step", what="interrupt", later=True),
    # While the tokens are counted.
    Row("count", 1, "counting tokens, microbatch 1", number=2),
    Row("count", 0, "counting tokens, microbatch 0", later=True, **SQUARE),
    Row("count", 2, "counting tokens, microbatch 3", number=4, later=True),
    # Forward.
    Row("F0", 0, "microbatch 1, action 0F1", number=2),
    Row("F1", 1, "microbatch 2, action 1F2", number=3, later=True),
    Row("F2", 2, "microbatch 0, action 2FB0"),
    Row("F0", 1, "microbatch 0, action 0F0", later=True, shard=True, **SQUARE),
    # Backward.
    Row("B0", 0, "microbatch 3, action 0B3", number=4, later=True),
    Row("B1", 1, "microbatch 0, action 1B0"),
    Row("B2", 2, "microbatch 1, action 2FB1", number=2, later=True),
    Row("B0", 0, "microbatch 3, action 0B3", number=4, **SQUARE),
    # A send, and a receive.
    Row("send", 0, "at: send 0>1 of microbatch 1", number=2),
    Row("send", 1, "at: send 1>2 of microbatch 0", later=True),
    Row("send", 3, "at: send 1>0 of microbatch 1", number=2, later=True, shard=True, **SQUARE),
    Row("receive", 0, "at: %", number=1, later=True),
    Row("receive", 1, "at: %", number=3),
    Row("receive", 2, "at: %", number=2, **SQUARE),
    # The reduction over data ranks.
    Row("reduce", 1, "at: reduce stage 0", **SQUARE),
    Row("reduce", 3, "at: reduce stage 1", pp=3, dp=2, later=True),
    Row("reduce", 2, "at: reduce stage 1", later=True, shard=True, **SQUARE),
    Row("unshard", 0, "at: %2, %3 = unshard stage 0", later=True, shard=True, **SQUARE),
    # The closing exchange, and what is written behind it: made ready before.
    Row("close", 0, "in the closing exchange"),
    Row("close", 1, "in the closing exchange", later=True),
    Row("close", 3, "in the closing exchange", later=True, **SQUARE),
    Row("", 1, "bringing the results together", what="gradient", later=True),
    Row("", 2, "bringing the results together", what="gradient", **SQUARE),
    # A process that is killed.
    Row("F0", 0, "", what="kill", later=True),
    Row("B1", 1, "", what="kill"),
    Row("compare", 1, "", what="kill", later=True),
    Row("F1", 3, "", what="kill", later=True, **SQUARE),
    # A rank that does not come.
    Row("F0", 0, "", number=2, what="stall"),
    Row("F1", 1, "", what="stall", later=True),
    Row("B1", 2, "", what="stall", **SQUARE),
    # Ctrl-C.
    Row("F0", 0, "microbatch 1, action 0F1", number=2, what="interrupt", later=True),
    Row("B1", 1, "microbatch 1, action 1B1", number=2, what="interrupt"),
    Row("F1", 2, "microbatch 0, action 1FB0", what="interrupt", later=True, **SQUARE),
    # Other batches: a step object that all ranks may go on using.
    Row("", 0, "", what="other batch"),
    Row("", 1, "", what="other batch", later=True),
    Row("", 2, "", what="other batch", later=True, **SQUARE),
    # Four stages.
    Row("F2", 2, "microbatch 1, action 2F1", number=2, pp=4),
    Row("B2", 2, "microbatch 1, action 2B1", number=2, pp=4),
    Row("trace", 2, "microbatch 0", pp=4),
)
