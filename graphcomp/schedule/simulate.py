"""Turn costs into time, bubble and peak memory of every rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from graphcomp.errors import ScheduleError
from graphcomp.schedule.actions import Action, Kind
from graphcomp.schedule.checker import check
from graphcomp.schedule.dependencies import needs, yields
from graphcomp.schedule.memory import peak_bytes, peak_in_flight
from graphcomp.schedule.progress import advance
from graphcomp.schedule.schedule import Schedule

__all__ = ["Cost", "RankTimes", "Simulation", "Span", "simulate"]


@dataclass(frozen=True)
class Cost:
    """Measured or estimated costs.

    `seconds[stage, kind]` of each compute action (an `FB` that is not given costs its F and B); `transfer`:
    seconds from a send to its arrival; `kept_bytes[stage]`: bytes of saved values that one microbatch holds
    from its forward to the end of its backward (0 where not given).
    """

    seconds: Mapping[tuple[int, Kind], float]
    transfer: float = 0.0
    kept_bytes: Mapping[int, int] = field(default_factory=dict)

    @classmethod
    def uniform(
        cls, stages: int, *, forward: float, backward: float, transfer: float = 0.0, kept_bytes: int = 0
    ) -> Cost:
        """The same cost for every stage; I and W are half a backward each. Times in seconds."""
        times = {Kind.F: forward, Kind.B: backward, Kind.I: backward / 2, Kind.W: backward / 2}
        seconds = {(stage, kind): time for stage in range(stages) for kind, time in times.items()}
        return cls(seconds, transfer, dict.fromkeys(range(stages), kept_bytes))

    def of(self, action: Action) -> float:
        """Seconds that `action` keeps its rank busy: 0 for a transfer. Raises ScheduleError if it is not
        known."""
        if action.kind.is_transfer:
            return 0.0
        parts = [action.kind]
        if action.kind is Kind.FB and (action.stage, Kind.FB) not in self.seconds:
            parts = [Kind.F, Kind.B]
        missing = [kind.value for kind in parts if (action.stage, kind) not in self.seconds]
        if missing:
            raise ScheduleError(
                f"no cost is given for {' and '.join(missing)} of stage {action.stage}", where=str(action)
            )
        return sum(self.seconds[action.stage, kind] for kind in parts)


@dataclass(frozen=True, slots=True)
class Span:
    """One compute action in time, in seconds from the start of the step."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class RankTimes:
    """One rank's part: seconds busy; seconds idle until the last rank is done, and their share of the step;
    when its last action ends; the most microbatches in flight, and the most bytes of saved values, at any
    time."""

    busy: float
    idle: float
    bubble: float
    finish: float
    peak_in_flight: int
    peak_bytes: int


@dataclass(frozen=True)
class Simulation:
    """The predicted step: its length in seconds, each rank's numbers, and when each compute action runs."""

    seconds: float
    ranks: tuple[RankTimes, ...]
    spans: tuple[tuple[Span, ...], ...]


def simulate(schedule: Schedule, cost: Cost) -> Simulation:
    """Predict a step with asynchronous sends and receives posted early: only compute keeps a rank busy.

    A value arrives `cost.transfer` seconds after its producer ends, whatever else is on the way. Without
    transfers in the schedule the same holds between stages of different ranks. Raises ScheduleError if the
    schedule cannot run.
    """
    check(schedule, blocking=False)
    clock = [0.0] * len(schedule.ranks)
    done: dict[Action, float] = {}
    spans: list[list[Span]] = [[] for _ in schedule.ranks]
    for action in advance(schedule, blocking=False).order:
        rank = schedule.rank_of(action.stage)
        ready = max((_arrival(schedule, cost, done, rank, event) for event in needs(schedule, action)), default=0.0)
        end = ready
        if not action.kind.is_transfer:
            start = max(clock[rank], ready)
            end = clock[rank] = start + cost.of(action)
            spans[rank].append(Span(action, start, end))
        done.update(dict.fromkeys(yields(action), end))
    total = max(clock, default=0.0)
    in_flight, kept = peak_in_flight(schedule), peak_bytes(schedule, cost.kept_bytes)
    ranks = []
    for rank, row in enumerate(spans):
        busy = sum(cost.of(span.action) for span in row)
        bubble = (total - busy) / total if total else 0.0
        ranks.append(RankTimes(busy, total - busy, bubble, clock[rank], in_flight[rank], kept[rank]))
    return Simulation(total, tuple(ranks), tuple(map(tuple, spans)))


def _arrival(schedule: Schedule, cost: Cost, done: Mapping[Action, float], rank: int, event: Action) -> float:
    return done[event] + (cost.transfer if schedule.rank_of(event.stage) != rank else 0.0)
