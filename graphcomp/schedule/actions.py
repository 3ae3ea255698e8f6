"""Actions: the units of a schedule, and their text form (`0F1` is the forward of microbatch 1 on stage 0)."""

from __future__ import annotations

import enum
import re
from collections.abc import Sequence
from dataclasses import dataclass

from graphcomp.errors import ScheduleError

__all__ = ["Action", "Kind", "counterpart", "named_stages", "parse"]


class Kind(enum.Enum):
    """What an action does. The value is the text form, the same as in torch.distributed.pipelining (but for
    `FB`)."""

    F = "F"
    """Forward."""
    B = "B"
    """Whole backward: gradients of the stage's inputs and of its parameters."""
    I = "I"  # noqa: E741 - the field's own name for it
    """Backward of the stage's inputs only; its `W` follows later."""
    W = "W"
    """Backward of the stage's parameters only."""
    FB = "FB"
    """Forward and whole backward as one action, where a schedule runs them back to back: nothing is saved
    between."""
    SEND_F = "SEND_F"
    """Send the activation to the next stage."""
    RECV_F = "RECV_F"
    """Receive the activation from the previous stage."""
    SEND_B = "SEND_B"
    """Send the gradient of the stage's input to the previous stage."""
    RECV_B = "RECV_B"
    """Receive the gradient of the stage's output from the next stage."""

    @property
    def is_transfer(self) -> bool:
        """True for sends and receives."""
        return self in _PARTNER

    @property
    def is_send(self) -> bool:
        """True for the two sends."""
        return self in (Kind.SEND_F, Kind.SEND_B)


# For each transfer: the kind at the other end, and the distance from this stage to the stage there.
_PARTNER = {
    Kind.SEND_F: (Kind.RECV_F, 1),
    Kind.RECV_F: (Kind.SEND_F, -1),
    Kind.SEND_B: (Kind.RECV_B, -1),
    Kind.RECV_B: (Kind.SEND_B, 1),
}
_TEXT = re.compile(r"(\d+)([A-Z_]+)(\d+)", re.ASCII)
_KINDS = {kind.value: kind for kind in Kind}


@dataclass(frozen=True, slots=True)
class Action:
    """One unit of work: `kind` on `stage` for `microbatch` (both count from 0)."""

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.microbatch}"


def named_stages(stages: Sequence[int]) -> str:
    """`stage 1`, or `stages 1, 3`: what messages call the stages of a rank."""
    return f"stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages)) or 'none'}"


def counterpart(action: Action) -> Action:
    """The action at the other end of a transfer: `0SEND_F2` and `1RECV_F2` are each other's counterpart.

    Raises KeyError for an action that is no transfer.
    """
    kind, distance = _PARTNER[action.kind]
    return Action(action.stage + distance, kind, action.microbatch)


def parse(text: str) -> Action:
    """Read the text form of an action; the inverse of `str(action)`. Raises ScheduleError for anything
    else."""
    match = _TEXT.fullmatch(text.strip())
    if match is None or match[2] not in _KINDS:
        raise ScheduleError(
            f"{text!r} is not the text of an action",
            expected=f"<stage><kind><microbatch>, such as 0F1, with a kind of {', '.join(_KINDS)}",
            got=repr(text),
        )
    return Action(int(match[1]), _KINDS[match[2]], int(match[3]))
