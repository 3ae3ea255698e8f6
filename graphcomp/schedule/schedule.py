"""A schedule: for every rank the ordered list of its actions, as plain data with a text form."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from graphcomp.errors import ScheduleError
from graphcomp.schedule.actions import Action, parse

__all__ = ["Schedule", "dealt", "require_counts"]

_HEAD = re.compile(r"(\S+): (\d+) stages?, (\d+) microbatch(?:es)?")
_RANK = re.compile(r"rank (\d+) \((?:no stage|stages? ([\d ]+))\):(.*)")
_SETS = ("backward stages", "forward edges", "backward edges")


@dataclass(frozen=True)
class Schedule:
    """What every rank does, in order. Making one checks nothing: `check` proves that it can run.

    - `placement[stage]` is the rank that holds the stage (a rank may hold several).
    - `backward` are the stages that run a backward; the others only run forward (evaluation, nothing to
      train).
    - `forward_edges` (stages s that send s -> s+1) and `backward_edges` (stages s that send s -> s-1) are
      None until transfers are inserted; till then every stage depends directly on its neighbours.
    """

    name: str
    stages: int
    microbatches: int
    ranks: tuple[tuple[Action, ...], ...]
    placement: tuple[int, ...]
    backward: frozenset[int]
    forward_edges: frozenset[int] | None = None
    backward_edges: frozenset[int] | None = None

    @property
    def has_transfers(self) -> bool:
        """True once sends and receives are in the lists."""
        return self.forward_edges is not None

    def rank_of(self, stage: int) -> int:
        """The rank that holds `stage`."""
        return self.placement[stage]

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that `rank` holds, ascending."""
        return tuple(stage for stage, holder in enumerate(self.placement) if holder == rank)

    def text(self) -> str:
        """The schedule as a table, one line a rank; the same on every run and rank. `from_text` reads it
        back."""
        lines = [f"{self.name}: {_count(self.stages, 'stage')}, {_count(self.microbatches, 'microbatch', 'es')}"]
        backward = None if self.backward == frozenset(range(self.stages)) else self.backward
        for label, members in zip(_SETS, (backward, self.forward_edges, self.backward_edges), strict=True):
            if members is not None:
                lines.append(f"{label}: {' '.join(map(str, sorted(members))) or 'none'}")
        for rank, actions in enumerate(self.ranks):
            held = self.stages_of(rank)
            label = f"stage{'s' * (len(held) > 1)} {' '.join(map(str, held))}" if held else "no stage"
            lines.append(" ".join([f"rank {rank} ({label}):", *map(str, actions)]))
        return "\n".join(lines) + "\n"

    def __str__(self) -> str:
        return self.text()

    @classmethod
    def from_text(cls, text: str) -> Schedule:
        """Read what `text()` wrote. Raises ScheduleError naming the first line that does not fit."""
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        head = _HEAD.fullmatch(lines[0]) if lines else None
        if head is None:
            raise _bad_line(1, lines[0] if lines else "", "<name>: <n> stages, <n> microbatches")
        stages = int(head[2])
        sets: dict[str, frozenset[int]] = {}
        ranks: list[tuple[Action, ...]] = []
        placement: dict[int, int] = {}
        for number, line in enumerate(lines[1:], start=2):
            label, _, members = line.partition(": ")
            if label in _SETS and not ranks:
                sets[label] = _read_set(number, line, members)
                continue
            match = _RANK.fullmatch(line)
            if match is None or int(match[1]) != len(ranks):
                raise _bad_line(number, line, f"rank {len(ranks)} (stage <s>): <actions>")
            placement.update(dict.fromkeys(map(int, (match[2] or "").split()), len(ranks)))
            ranks.append(tuple(map(parse, match[3].split())))
        if sorted(placement) != list(range(stages)):
            raise ScheduleError(
                "the ranks of a schedule do not hold its stages",
                where=f"text of schedule {head[1]!r}",
                expected=f"stages 0..{stages - 1}, each on one rank",
                got=f"stages {sorted(placement)}",
            )
        return cls(
            name=head[1],
            stages=stages,
            microbatches=int(head[3]),
            ranks=tuple(ranks),
            placement=tuple(placement[stage] for stage in range(stages)),
            backward=sets.get("backward stages", frozenset(range(stages))),
            forward_edges=sets.get("forward edges"),
            backward_edges=sets.get("backward edges"),
        )


def dealt(name: str, stages: int, microbatches: int, orders: Sequence[Iterable[Action]]) -> Schedule:
    """The schedule in which rank r of p does `orders[r]` and stage s is on rank s % p, every stage with a backward."""
    placement = tuple(stage % len(orders) for stage in range(stages))
    return Schedule(name, stages, microbatches, tuple(map(tuple, orders)), placement, frozenset(range(stages)))


def require_counts(name: str, stages: int, microbatches: int, ranks: int | None, *, several: bool) -> int:
    """The number of ranks; None: as many as stages. several: whether a rank may hold more than one stage.

    Raises ScheduleError for less than one stage, a negative number of microbatches, or stages that cannot be dealt.
    """
    if stages < 1 or microbatches < 0:
        raise ScheduleError(
            f"schedule {name!r} cannot be built for these numbers",
            expected="stages >= 1 and microbatches >= 0",
            got=f"stages={stages}, microbatches={microbatches}",
        )
    ranks = stages if ranks is None else ranks
    if ranks < 1 or stages % ranks or (ranks != stages and not several):
        raise ScheduleError(
            f"schedule {name!r} cannot deal these stages to these ranks",
            expected="as many stages on each rank as on any other" if several else "one stage on each rank",
            got=f"stages={stages}, ranks={ranks}",
        )
    return ranks


def _count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}{'' if number == 1 else plural}"


def _read_set(number: int, line: str, members: str) -> frozenset[int]:
    words = [] if members == "none" else members.split()
    if not all(word.isdecimal() for word in words):
        raise _bad_line(number, line, "stage numbers, or none")
    return frozenset(map(int, words))


def _bad_line(number: int, line: str, expected: str) -> ScheduleError:
    return ScheduleError(
        "a line of a schedule's text does not fit", where=f"line {number}", expected=expected, got=repr(line)
    )
