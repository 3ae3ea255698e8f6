"""Schedules: their text, their properties at every size, and torch's own order where it has the same."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import Any

import expecttest
import pytest
from torch.distributed.pipelining import schedules as theirs

from graphcomp.errors import PlanError, ScheduleError
from graphcomp.schedule import (
    KNOWN,
    Action,
    Cost,
    EagerOneFOneB,
    GPipe,
    InterleavedOneFOneB,
    Kind,
    OneFOneB,
    check,
    fuse,
    get,
    parse,
    peak_in_flight,
    simulate,
    with_transfers,
)

SIZES = list(product(range(1, 9), range(10)))
THEIRS = {"gpipe": theirs.ScheduleGPipe, "1f1b": theirs.Schedule1F1B}


class TestText(expecttest.TestCase):
    def test_gpipe(self) -> None:
        self.assertExpectedInline(
            get("gpipe").build(2, 3).text(),
            """\
gpipe: 2 stages, 3 microbatches
rank 0 (stage 0): 0F0 0F1 0F2 0B0 0B1 0B2
rank 1 (stage 1): 1F0 1F1 1F2 1B0 1B1 1B2
""",
        )

    def test_one_f_one_b(self) -> None:
        self.assertExpectedInline(
            get("1f1b").build(3, 4).text(),
            """\
1f1b: 3 stages, 4 microbatches
rank 0 (stage 0): 0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3
rank 1 (stage 1): 1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3
rank 2 (stage 2): 2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3
""",
        )

    def test_fewer_microbatches_than_stages(self) -> None:
        self.assertExpectedInline(
            get("1f1b").build(4, 2).text(),
            """\
1f1b: 4 stages, 2 microbatches
rank 0 (stage 0): 0F0 0F1 0B0 0B1
rank 1 (stage 1): 1F0 1F1 1B0 1B1
rank 2 (stage 2): 2F0 2F1 2B0 2B1
rank 3 (stage 3): 3F0 3B0 3F1 3B1
""",
        )

    def test_eager_one_f_one_b(self) -> None:
        self.assertExpectedInline(
            get("eager-1f1b").build(3, 6).text(),
            """\
eager-1f1b: 3 stages, 6 microbatches
rank 0 (stage 0): 0F0 0F1 0F2 0F3 0F4 0B0 0F5 0B1 0B2 0B3 0B4 0B5
rank 1 (stage 1): 1F0 1F1 1F2 1B0 1F3 1B1 1F4 1B2 1F5 1B3 1B4 1B5
rank 2 (stage 2): 2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3 2F4 2B4 2F5 2B5
""",
        )

    def test_no_microbatch(self) -> None:
        self.assertExpectedInline(
            get("1f1b").build(2, 0).text(),
            """\
1f1b: 2 stages, 0 microbatches
rank 0 (stage 0):
rank 1 (stage 1):
""",
        )


@pytest.mark.parametrize("name", KNOWN)
def test_every_size_runs_every_microbatch_in_order(name: str) -> None:
    for stages, microbatches in SIZES:
        schedule = get(name).build(stages, microbatches)
        check(schedule)
        for stage, actions in enumerate(schedule.ranks):
            for kind in (Kind.F, Kind.B):
                done = [action for action in actions if action.kind is kind]
                assert done == [Action(stage, kind, microbatch) for microbatch in range(microbatches)]


def test_microbatches_in_flight() -> None:
    for stages, microbatches in SIZES:
        gpipe, one_f_one_b, eager = (get(n).build(stages, microbatches) for n in ("gpipe", "1f1b", "eager-1f1b"))
        assert peak_in_flight(gpipe) == (microbatches,) * stages
        bound = tuple(min(microbatches, stages - stage) for stage in range(stages))
        assert peak_in_flight(one_f_one_b) == peak_in_flight(fuse(one_f_one_b)) == bound
        deeper = tuple(min(microbatches, 2 * (stages - 1 - stage) + 1) for stage in range(stages))
        assert peak_in_flight(eager) == peak_in_flight(fuse(eager)) == deeper


@pytest.mark.parametrize("name", KNOWN)
def test_the_last_stage_fuses_or_not(name: str) -> None:
    for stages, microbatches in SIZES:
        edged = with_transfers(get(name).build(stages, microbatches), range(stages - 1), range(1, stages))
        fused = [str(action) for action in fuse(edged).ranks[-1] if action.kind is Kind.FB]
        always = [f"{stages - 1}FB{microbatch}" for microbatch in range(microbatches)]
        assert get(name).fuses == (fused == always) or microbatches < 2


def test_a_slow_transfer_is_hidden_behind_the_deeper_warm_up() -> None:
    """A forward takes 1 second, a backward 2, a transfer 1.5: with 1F1B stages wait for it at every microbatch."""
    cost = Cost.uniform(4, forward=1.0, backward=2.0, transfer=1.5)
    seconds = {name: simulate(get(name).build(4, 32), cost).seconds for name in ("1f1b", "eager-1f1b")}
    fill_and_drain = 3 * 3 + 2 * 3 * 1.5  # three stages' F and B, and as many transfers either way
    assert seconds["eager-1f1b"] == 3 * 32 + fill_and_drain
    assert seconds["1f1b"] > seconds["eager-1f1b"] + 32


def executed_by_torch(name: str, stage: int, stages: int, microbatches: int) -> list[Action]:
    """The order in which torch's own step loop asks a stage for its work, recorded by an idle stage."""
    done: list[Action] = []

    def no_transfer(microbatch: int) -> list[Any]:
        return []

    recorder: Any = SimpleNamespace(
        stage_index=stage,
        num_stages=stages,
        is_last=stage == stages - 1,
        forward_one_chunk=lambda microbatch, *_, **__: done.append(Action(stage, Kind.F, microbatch)),
        backward_one_chunk=lambda microbatch, **_: done.append(Action(stage, Kind.B, microbatch)),
        perform_reduce_grad=lambda scale: None,
        **{f"get_{direction}_{end}_ops": no_transfer for direction in ("fwd", "bwd") for end in ("send", "recv")},
    )
    schedule: Any = THEIRS[name](recorder, microbatches)
    schedule._initialize_stage = lambda *_: None
    schedule._step_microbatches([()] * microbatches, [{}] * microbatches)
    return done


@pytest.mark.parametrize("name", THEIRS)
def test_order_is_what_torch_executes(name: str) -> None:
    compared = 0
    for stages, microbatches in SIZES:
        if microbatches == 0 or (name == "1f1b" and microbatches < stages):
            continue  # torch refuses these
        schedule = get(name).build(stages, microbatches)
        for stage in range(stages):
            assert list(schedule.ranks[stage]) == executed_by_torch(name, stage, stages, microbatches)
            compared += 1
    assert compared == {"gpipe": 324, "1f1b": 156}[name]


@pytest.mark.parametrize("name", THEIRS)
def test_order_is_that_of_torchs_table(name: str) -> None:
    for stages, microbatches in SIZES:
        if microbatches == 0 or (name == "1f1b" and microbatches < stages):
            continue
        sized: Any = SimpleNamespace(num_stages=stages)
        table = THEIRS[name](sized, microbatches).pipeline_order
        assert table is not None
        schedule = get(name).build(stages, microbatches)
        for rank, row in table.items():
            order = [parse(str(entry)) for entry in row if entry and entry.is_compute_op]
            if name == "1f1b" and rank == stages - 1:
                # Here the table numbers the forwards from 1. The step loop, compared above, goes from 0.
                order = [
                    Action(rank, Kind.F, action.microbatch - 1) if action.kind is Kind.F else action for action in order
                ]
            assert list(schedule.ranks[rank]) == order


def test_torchs_dry_run_completes_with_our_transfers() -> None:
    for name, (stages, microbatches) in product(KNOWN, SIZES):
        if microbatches == 0:
            continue
        schedule = with_transfers(get(name).build(stages, microbatches), range(stages - 1), range(1, stages))
        table = {
            rank: [theirs._Action.from_str(str(action)) for action in actions]
            for rank, actions in enumerate(schedule.ranks)
        }
        theirs._validate_schedule(table, stages, stages, microbatches)
        theirs._simulate_comms_compute(table, lambda stage: stage, stages)


def test_registry() -> None:
    assert KNOWN == ("1f1b", "eager-1f1b", "gpipe", "interleaved-1f1b")
    assert get("gpipe") == GPipe()
    assert get("1f1b") == OneFOneB()
    assert get("eager-1f1b") == EagerOneFOneB()
    assert get("interleaved-1f1b") == InterleavedOneFOneB()
    for name in KNOWN:
        assert get(name).name == name


@pytest.mark.parametrize("name", ["1F1B", "interleaved", "", None, ["gpipe"]])
def test_unknown_name_lists_the_known_ones(name: Any) -> None:
    with pytest.raises(PlanError, match="there is no schedule") as caught:
        get(name)
    assert caught.value.expected == "one of 1f1b, eager-1f1b, gpipe, interleaved-1f1b"
    assert caught.value.got == repr(name)


@pytest.mark.parametrize("name", KNOWN)
@pytest.mark.parametrize(("stages", "microbatches"), [(0, 1), (-1, 1), (1, -1)])
def test_impossible_numbers(name: str, stages: int, microbatches: int) -> None:
    with pytest.raises(ScheduleError, match=f"schedule '{name}' cannot be built for these numbers") as caught:
        get(name).build(stages, microbatches)
    assert caught.value.expected == "stages >= 1 and microbatches >= 0"
    assert caught.value.got == f"stages={stages}, microbatches={microbatches}"
