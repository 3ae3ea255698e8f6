"""Where a rank reduces the gradients of its stages over data ranks: beside the backward of the stages before them.

Stages end in descending order. So once a stage's last backward is through, what is left on the rank is work of lower
stages, and the reduction is dealt to the gaps of that: its first part is started behind the stage's last backward, its
last one before the first part of the next lower stage's. On all data ranks reductions come in the same order, however
many microbatches each has. And who waits for one waits, on any rank, for backwards of this stage and of higher ones,
and for their reductions; none of these waits for a lower stage's. So ranks cannot hold each other up.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from graphcomp.dataparallel.step import DataParallel
from graphcomp.errors import ScheduleError
from graphcomp.schedule.actions import Action, Kind


@dataclass(frozen=True)
class Part:
    """Part `number` of `count` of the reduction of a stage."""

    stage: int
    number: int = 0
    count: int = 1


def early_stages(data: DataParallel, stages: Sequence[int]) -> list[int]:
    """The stages of a rank that reduce beside the backward of lower ones, descending.

    Not the lowest one; nor one that reduces a parameter of other stages, too, whose shares have to arrive before.
    """
    names = {stage: data.reduced_on(stage) for stage in stages[1:]}
    alone = (stage for stage, own in names.items() if own and all(len(data.homes[name]) == 1 for name in own))
    return sorted(alone, reverse=True)


def reductions(early: Sequence[int], runs: Sequence[Action]) -> tuple[dict[Action, list[Part]], list[Part]]:
    """What stands behind each computation of a rank, and what is left for the end. early: see `early_stages`.

    A stage without a backward here, which other data ranks have, is reduced as a whole, in its place of the order.
    """
    ends = {action.stage: place for place, action in enumerate(runs) if action.kind in (Kind.B, Kind.FB)}
    places = [ends[stage] for stage in early if stage in ends]
    if places != sorted(places):
        raise ScheduleError(
            "the stages of a rank do not end in descending order, in which their gradients are reduced",
            expected=f"the last backwards of stages {', '.join(map(str, early))} in this order",
            got=" ".join(map(str, runs)),
        )
    limits = dict(pairwise([*places, len(runs) - 1]))
    found: defaultdict[Action, list[Part]] = defaultdict(list)
    waiting: list[Part] = []
    for stage in early:
        if stage not in ends:
            waiting.append(Part(stage))
            continue
        begin = ends[stage]
        found[runs[begin]] += waiting
        waiting = []
        count = limits[begin] - begin + 1
        for number in range(count):
            found[runs[begin + number]].append(Part(stage, number, count))
    return found, waiting
