"""The plan: a frozen description of what the user asks for. Checked once, when it is made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from graphcomp.errors import PlanError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

SCHEDULES = ("gpipe", "1f1b")
BACKENDS = ("inductor", "eager")
PARAMETERS = ("replicate", "shard")
CHECKS = (None, "transfers")
AXES = ("pp", "dp", "tp", "cp")


@dataclass(frozen=True)
class Plan:
    """What to compile for.

    mesh: a `DeviceMesh` with axes named from pp, dp, tp, cp; None: this process alone.
    stages: number of pipeline stages; None: the size of `pp`, or 1.
    schedule: "gpipe" or "1f1b".
    split: names of the modules that begin stages 1, 2, ... in order of execution; None: a balanced cut.
    parameters: "replicate" or "shard" (over `dp`).
    backend: "inductor", or "eager" (the same graphs, run operation by operation, bitwise as eager PyTorch).
    accumulate_dtype: dtype in which gradients accumulate; None: the parameter's own.
    max_programs: most specialisations kept before a step refuses to make another.
    deadline: seconds to wait for another rank before giving up.
    check: "transfers" sends a fingerprint with each transfer and compares it; None does not.
    quiet: show no progress.

    Raises PlanError for an unknown or contradictory option.
    """

    mesh: DeviceMesh | None = None
    stages: int | None = None
    schedule: str = "1f1b"
    split: Sequence[str] | None = None
    parameters: Literal["replicate", "shard"] = "replicate"
    backend: Literal["inductor", "eager"] = "inductor"
    accumulate_dtype: torch.dtype | None = None
    max_programs: int = 8
    deadline: float = 1800.0
    check: Literal["transfers"] | None = None
    quiet: bool = False
