"""The checker: all good schedules pass, and each kind of broken one is refused with its place."""

from __future__ import annotations

from dataclasses import replace

import expecttest
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphcomp.errors import ScheduleError
from graphcomp.schedule import KNOWN, Action, Schedule, check, counterpart, get, parse, with_transfers


def complete(name: str, stages: int, microbatches: int) -> Schedule:
    return with_transfers(get(name).build(stages, microbatches), range(stages - 1), range(1, stages))


def parsed(rows: list[str]) -> tuple[tuple[Action, ...], ...]:
    return tuple(tuple(map(parse, row.split())) for row in rows)


def swapped(schedule: Schedule, first: str, second: str) -> Schedule:
    """The two actions, each in the other's place."""
    swap = {parse(first): parse(second), parse(second): parse(first)}
    return replace(schedule, ranks=tuple(tuple(swap.get(a, a) for a in actions) for actions in schedule.ranks))


def without(schedule: Schedule, text: str) -> Schedule:
    dropped = parse(text)
    return replace(schedule, ranks=tuple(tuple(a for a in actions if a != dropped) for actions in schedule.ranks))


def refused(schedule: Schedule, *, blocking: bool = True) -> ScheduleError:
    with pytest.raises(ScheduleError) as caught:
        check(schedule, blocking=blocking)
    return caught.value


@pytest.mark.parametrize("blocking", [True, False])
@pytest.mark.parametrize("name", KNOWN)
def test_every_size_completes(name: str, blocking: bool) -> None:
    for stages in range(1, 9):
        for microbatches in range(10):
            proof = check(complete(name, stages, microbatches), blocking=blocking)
            assert proof.actions == 2 * stages * microbatches + 4 * (stages - 1) * microbatches
            assert proof.blocking is blocking


@pytest.mark.parametrize("blocking", [True, False])
@pytest.mark.parametrize("name", KNOWN)
def test_48_stages_and_64_microbatches_take_linear_work(name: str, blocking: bool) -> None:
    schedule = complete(name, 48, 64)
    proof = check(schedule, blocking=blocking)
    assert proof.actions == sum(map(len, schedule.ranks)) == 2 * 48 * 64 + 4 * 47 * 64
    assert proof.visits <= proof.actions + 48


class TestMessages(expecttest.TestCase):
    def test_sends_first_on_both_sides(self) -> None:
        # The order that a 1F1B with a send right after each producer would have.
        self.assertExpectedInline(
            str(refused(swapped(complete("1f1b", 2, 3), "1SEND_B0", "1RECV_F1"))),
            """\
deadlock: rank 0 waits for rank 1 waits for rank 0
  where: schedule '1f1b', blocking sends
  expected: every rank comes to its end
  got: 2 of 2 ranks stand still
    rank 0 at action 3 of 12 waits for 1RECV_F1 (rank 1): 0F0 0SEND_F0 0F1 >0SEND_F1< 0RECV_B0 0B0 0F2 ...
    rank 1 at action 3 of 12 waits for 0RECV_B0 (rank 0): 1RECV_F0 1F0 1B0 >1SEND_B0< 1RECV_F1 1F1 1B1 ...
  what to do: with buffered sends it completes; let one of the ranks receive before it sends
  (see docs/errors.md#scheduleerror)""",
        )

    def test_cycle_of_compute(self) -> None:
        # Stage 0 wants a gradient before its second forward, stage 1 a second activation before its backward.
        rows = ["0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"]
        schedule = replace(get("gpipe").build(2, 2), ranks=parsed(rows))
        self.assertExpectedInline(
            str(refused(schedule)),
            """\
deadlock: rank 0 waits for rank 1 waits for rank 0
  where: schedule 'gpipe', blocking sends
  expected: every rank comes to its end
  got: 2 of 2 ranks stand still
    rank 0 at action 1 of 4 waits for 1B0 (rank 1): 0F0 >0B0< 0F1 0B1
    rank 1 at action 1 of 4 waits for 0F1 (rank 0): 1F0 >1F1< 1B0 1B1
  (see docs/errors.md#scheduleerror)""",
        )

    def test_cycle_with_buffered_sends(self) -> None:
        # Stage 0 wants its first gradient before it sends the activation that the gradient comes from.
        rows = ["0F0 0RECV_B0 0SEND_F0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0"]
        schedule = replace(complete("gpipe", 2, 1), ranks=parsed(rows))
        self.assertExpectedInline(
            str(refused(schedule, blocking=False)),
            """\
deadlock: rank 0 waits for rank 1 waits for rank 0
  where: schedule 'gpipe', buffered sends
  expected: every rank comes to its end
  got: 2 of 2 ranks stand still
    rank 0 at action 1 of 4 waits for 1SEND_B0 (rank 1): 0F0 >0RECV_B0< 0SEND_F0 0B0
    rank 1 at action 0 of 4 waits for 0SEND_F0 (rank 0): >1RECV_F0< 1F0 1B0 1SEND_B0
  (see docs/errors.md#scheduleerror)""",
        )

    def test_dropped_action(self) -> None:
        self.assertExpectedInline(
            str(refused(without(complete("1f1b", 2, 2), "1B1"))),
            """\
1B1 is missing
  where: schedule '1f1b', rank 1
  expected: every microbatch 0..1 exactly once
  got: 1RECV_F0 1F0 1B0 1RECV_F1 1SEND_B0 1F1 1SEND_B1
  (see docs/errors.md#scheduleerror)""",
        )

    def test_missing_receive(self) -> None:
        self.assertExpectedInline(
            str(refused(without(complete("1f1b", 2, 2), "1RECV_F1"))),
            """\
1RECV_F1 is missing
  where: schedule '1f1b', rank 1
  expected: every microbatch 0..1 exactly once
  got: 1RECV_F0 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1
  (see docs/errors.md#scheduleerror)""",
        )

    def test_backward_before_forward(self) -> None:
        self.assertExpectedInline(
            str(refused(swapped(get("1f1b").build(2, 2), "1F1", "1B1"))),
            """\
1B1 comes before 1F1, which it needs
  where: schedule '1f1b', rank 1, action 2: 1B1
  got: schedule '1f1b', rank 1, action 3: 1F1
  (see docs/errors.md#scheduleerror)""",
        )

    def test_another_order_of_receives(self) -> None:
        schedule = complete("gpipe", 2, 2)
        for pair in (("1RECV_F0", "1RECV_F1"), ("1F0", "1F1")):
            schedule = swapped(schedule, *pair)
        self.assertExpectedInline(
            str(refused(schedule)),
            """\
rank 0 sends in another order than rank 1 receives
  where: schedule 'gpipe', transfer 0 from 0 to 1
  expected: 1RECV_F0 for 0SEND_F0
  got: 1RECV_F1
  (see docs/errors.md#scheduleerror)""",
        )

    def test_twice(self) -> None:
        schedule = get("gpipe").build(1, 2)
        self.assertExpectedInline(
            str(refused(replace(schedule, ranks=(schedule.ranks[0] + (parse("0I1"),),)))),
            """\
0I1 does again what 0B1 did
  where: schedule 'gpipe', rank 0, action 4: 0I1
  got: schedule 'gpipe', rank 0, action 3: 0B1
  (see docs/errors.md#scheduleerror)""",
        )

    def test_wrong_rank(self) -> None:
        schedule = get("gpipe").build(2, 1)
        self.assertExpectedInline(
            str(refused(replace(schedule, ranks=schedule.ranks[::-1]))),
            """\
1F0 is on a rank that does not hold stage 1
  where: schedule 'gpipe', rank 0, action 0: 1F0
  expected: stages [0]
  got: stage 1
  (see docs/errors.md#scheduleerror)""",
        )

    def test_a_microbatch_too_many(self) -> None:
        self.assertExpectedInline(
            str(refused(replace(get("gpipe").build(1, 2), microbatches=1))),
            """\
0F1 has no place in this schedule
  where: schedule 'gpipe', rank 0, action 1: 0F1
  expected: microbatches below 1, backward stages [0], forward edges none yet, backward edges none yet
  (see docs/errors.md#scheduleerror)""",
        )

    def test_contradiction(self) -> None:
        self.assertExpectedInline(
            str(refused(replace(get("gpipe").build(2, 1), placement=(0, 2)))),
            """\
a schedule contradicts itself
  where: schedule 'gpipe'
  expected: a placement of 2 stages on ranks 0..1
  got: placement (0, 2), backward stages [0, 1], forward edges none yet, backward edges none yet
  (see docs/errors.md#scheduleerror)""",
        )


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"placement": (0,)}, "a placement of 2 stages on ranks 0..1"),
        ({"backward": frozenset({2})}, "backward stages among the stages"),
        (
            {"forward_edges": frozenset({0}), "backward_edges": None},
            "both forward and backward edges, or neither",
        ),
        ({"forward_edges": frozenset({1})}, "forward edges among stages 0..0"),
        ({"backward_edges": frozenset({0})}, "backward edges between two stages with a backward"),
    ],
)
def test_contradictions(change: dict[str, object], expected: str) -> None:
    error = refused(replace(complete("gpipe", 2, 1), **change))  # type: ignore[arg-type]
    assert error.what == "a schedule contradicts itself"
    assert error.expected == expected


def test_sends_first_completes_with_buffered_sends_only() -> None:
    schedule = swapped(complete("1f1b", 2, 3), "1SEND_B0", "1RECV_F1")
    assert "deadlock" in refused(schedule).what
    assert check(schedule, blocking=False).actions == sum(map(len, schedule.ranks))


def test_a_long_deadlock_shows_eight_ranks() -> None:
    schedule = complete("gpipe", 16, 2)
    first, *others = schedule.ranks
    late = tuple(a for a in first if a not in map(parse, ("0SEND_F0", "0RECV_B0")))
    stuck = (late[0], parse("0RECV_B0"), parse("0SEND_F0"), *late[1:])
    error = refused(replace(schedule, ranks=(stuck, *others)))
    assert str(error.got).count("waits for") == 8
    assert "and 8 more ranks" in str(error.got)


def test_split_backward() -> None:
    rows = ["0F0 0F1 0I0 0I1 0W0 0W1", "1F0 1I0 1F1 1I1 1W1 1W0"]
    split = replace(get("1f1b").build(2, 2), ranks=parsed(rows))
    schedule = with_transfers(split, [0], [1])
    check(schedule)
    assert refused(swapped(schedule, "0I0", "0W0")).what == "0W0 comes before 0I0, which it needs"
    assert refused(without(schedule, "1W0")).what == "1W0 is missing"


def completes(schedule: Schedule, blocking: bool) -> bool:
    """An independent answer, in the plainest way: try every rank again and again until nobody moves."""
    left = {rank: list(actions) for rank, actions in enumerate(schedule.ranks)}
    done: set[Action] = set()

    def ready(action: Action) -> bool:
        stage, kind, last = action.stage, action.kind.value, action.stage == schedule.stages - 1

        def has(kind: str) -> bool:
            return parse(f"{stage}{kind}{action.microbatch}") in done

        if kind == "F":
            return stage == 0 or has("RECV_F")
        if kind == "B":
            return has("F") and (last or has("RECV_B"))
        return has("F") if kind == "SEND_F" else has("B")

    moved = True
    while moved:
        moved = False
        for rank, actions in left.items():
            if not actions:
                continue
            action = actions[0]
            if not action.kind.is_transfer or action.kind.is_send:
                if not ready(action):
                    continue
            elif not blocking and counterpart(action) not in done:
                continue
            if blocking and action.kind.is_transfer:
                other = counterpart(action)
                peer = left[schedule.rank_of(other.stage)]
                if not peer or peer[0] != other or not ready(action if action.kind.is_send else other):
                    continue
                done.add(peer.pop(0))
            done.add(left[rank].pop(0))
            moved = True
    return not any(left.values())


@given(st.data())
def test_verdict_on_shuffled_schedules(data: st.DataObject) -> None:
    """A good schedule after a few swaps of neighbours: refused exactly if a plain loop gets stuck."""
    stages, microbatches = data.draw(st.integers(2, 3)), data.draw(st.integers(1, 3))
    schedule = complete(data.draw(st.sampled_from(KNOWN)), stages, microbatches)
    ranks = [list(actions) for actions in schedule.ranks]
    for _ in range(data.draw(st.integers(0, 4))):
        row = ranks[data.draw(st.integers(0, stages - 1))]
        at = data.draw(st.integers(0, len(row) - 2))
        row[at], row[at + 1] = row[at + 1], row[at]
    schedule = replace(schedule, ranks=tuple(map(tuple, ranks)))
    for blocking in (True, False):
        try:
            check(schedule, blocking=blocking)
            verdict = True
        except ScheduleError as error:
            verdict = False
            if "in another order" in error.what:
                continue  # stricter than the plain loop, in which messages carry their numbers
        assert verdict == completes(schedule, blocking)
