"""The text of rank programs, and what cannot be lowered."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline

from graphcomp import compile_train_step
from graphcomp import compiler as compiler_module
from graphcomp.compiler import GraphCompiler
from graphcomp.errors import ScheduleError, VerifyError
from graphcomp.ir.signature import Loss, Metric, Output
from graphcomp.plan import Plan
from graphcomp.runtime.program.executor import RankExecutor, run_virtual_ranks
from graphcomp.runtime.program.instructions import Free, HandOver, RankProgram, Run
from graphcomp.runtime.program.lifetimes import uses
from graphcomp.runtime.program.link import Context, State, link
from graphcomp.runtime.program.lower import distinct, lower
from graphcomp.runtime.program.streams import prove
from graphcomp.runtime.program.transport import VirtualNetwork, VirtualTransport
from graphcomp.schedule.registry import KNOWN, get
from tests.runtime.chain import WIDTH, callables_of, chain, programs_of, schedule_of
from tests.zoo import ZOO


def test_text_of_a_first_stage() -> None:
    assert_expected_inline(
        str(programs_of(chain(2, counted=True), "1f1b", 2)[0]),
        """\
rank 0 of 2: stage 0, 2 microbatches
  %0 = param w0
  %1 = param b0
  %2 = batch x of microbatch 0
  %3 = buffer c0
  %8 = batch x of microbatch 1
  g0 = grad w0
  g1 = grad b0
  %4, %5, %6, %7 = run 0F0(%0, %1, %2, %3) free %2
  send 0>1 of microbatch 0 (%4)
  free %4
  post 1>0 of microbatch 0
  %9, %10, %11, %12 = run 0F1(%0, %1, %8, %7) free %8, %7
  send 0>1 of microbatch 1 (%9)
  free %9
  post 1>0 of microbatch 1
  %13 = wait 1>0 of microbatch 0
  finish send 0>1 of microbatch 0
  begin g0-g1
  _, _ = run 0B0(%0, %5, %6, %13) adding to g0-g1 free %5, %6, %13
  %14 = wait 1>0 of microbatch 1
  finish send 0>1 of microbatch 1
  _, _ = run 0B1(%0, %10, %11, %14) adding to g0-g1 free %10, %11, %14
  update c0 = %12
  free %12
  finish sends
""",
    )


def test_text_of_a_last_stage() -> None:
    assert_expected_inline(
        str(programs_of(chain(2, tied=(0, 1)), "1f1b", 2)[1]),
        """\
rank 1 of 2: stage 1, 2 microbatches
  %1 = param w0
  %2 = param b1
  %3 = denominator loss
  g0 = grad w0
  g1 = grad b1
  post 0>1 of microbatch 0
  post 0>1 of microbatch 1
  %0 = wait 0>1 of microbatch 0
  begin g0-g1
  %4, %5, %6, _, _ = run 1FB0(%1, %2, %0, %3) adding to g0-g1 free %0
  send 1>0 of microbatch 0 (%6)
  free %6
  record loss loss = %4, metric size = %5
  free %4, %5
  %7 = wait 0>1 of microbatch 1
  %8, %9, %10, _, _ = run 1FB1(%1, %2, %7, %3) adding to g0-g1 free %7
  send 1>0 of microbatch 1 (%10)
  free %10
  record loss loss = %8, metric size = %9
  free %8, %9
  send 1>0 (g0)
  post 0>1
  %11 = wait 0>1
  replace g0 = %11
  free %11
  finish sends
""",
    )


def test_text_without_work() -> None:
    assert_expected_inline(
        str(programs_of(chain(2), "gpipe", 0)[0]),
        """\
rank 0 of 2: stage 0, 0 microbatches
""",
    )


@pytest.mark.parametrize("name", KNOWN)
def test_every_register_is_written_once_and_emptied_once(name: str) -> None:
    for program in programs_of(chain(4, counted=True, tied=(0, 2)), name, 5):
        lasting = {bind.register for bind in program.binds if bind.microbatch is None}
        written = [bind.register for bind in program.binds]
        emptied: list[int] = []
        for instruction in program.instructions:
            alive = set(written) - set(emptied)
            assert set(uses(instruction)) <= alive
            written += [one for one in getattr(instruction, "results", ()) if one is not None]
            if isinstance(instruction, Free | Run):
                emptied += instruction.frees if isinstance(instruction, Run) else instruction.registers
        assert len(set(written)) == len(written) == len(emptied) + len(lasting)
        assert set(emptied) == set(written) - lasting


def test_the_text_does_not_depend_on_the_run() -> None:
    one, other = (list(map(str, programs_of(chain(3), "1f1b", 4))) for _ in range(2))
    assert one == other


def test_microbatches_of_two_specialisations() -> None:
    one, other = chain(2), chain(2)
    other.callables[1, "fused"] = lambda *inputs: [result * 2 for result in one.callables[1, "fused"](*inputs)]
    cuts = [one.cut, other.cut, one.cut]
    assert distinct(cuts) == (one.cut, other.cut)
    schedule = schedule_of(one.cut, "1f1b", 3)
    programs = [lower(cuts, schedule, rank) for rank in range(2)]
    assert programs[1].needed == {(0, 1, "fused"), (1, 1, "fused")}
    network = VirtualNetwork()
    named = {**callables_of(one), **callables_of(other, 1)}
    batch = torch.randn(2, WIDTH)
    executors = [RankExecutor(program, distinct(cuts), named, VirtualTransport(network)) for program in programs]
    for executor in executors:
        executor.begin(one.inputs([batch] * 3))
    losses = [float(found["loss"]) for found in run_virtual_ranks(executors)[1].recorded(Loss)]
    assert losses[1] == 2 * losses[0] == 2 * losses[2]


def test_outputs_are_kept_only_on_request() -> None:
    made = chain(1)
    last = made.cut.stages[0]
    roles = tuple(Output("logits") if isinstance(role, Metric) else role for role in last.fused.outputs)
    last.fused.set_signature(last.fused.inputs, roles)
    schedule = schedule_of(made.cut, "1f1b", 1)
    for wanted in (False, True):
        program = lower([made.cut], schedule, 0, outputs=wanted)
        assert ((0, Output("logits")) in program.records) is wanted
        executor = RankExecutor(
            program,
            [made.cut],
            callables_of(made),
            VirtualTransport(VirtualNetwork()),
        )
        result = executor.run(made.inputs([torch.randn(2, WIDTH)]))
        assert len(result.recorded(Output)[0]) == int(wanted)


def test_schedules_that_do_not_belong() -> None:
    made = chain(2)
    schedule = schedule_of(made.cut, "1f1b", 2)
    with pytest.raises(ScheduleError, match="not built for these microbatches") as caught:
        lower([made.cut] * 3, schedule, 0)
    assert "expected: 3 microbatches, [2] stages" in str(caught.value)
    with pytest.raises(ScheduleError, match="no transfers yet"):
        lower([made.cut] * 2, get("1f1b").build(2, 2), 0)


def test_a_fused_action_whose_backward_waits() -> None:
    made = chain(2)
    schedule = schedule_of(made.cut, "1f1b", 1)
    stage = dataclasses.replace(made.cut.stages[1], fused=None)
    cut = dataclasses.replace(made.cut, stages=(made.cut.stages[0], stage))
    with pytest.raises(ScheduleError, match="action 1FB0 fuses what cannot be fused"):
        lower([cut], schedule, 1)


def test_a_value_that_nobody_computes() -> None:
    made = chain(2)
    cut = dataclasses.replace(made.cut, forward_boundaries={})
    with pytest.raises(VerifyError, match=r"'activation 0>1\[0\]' is needed") as caught:
        lower([cut], schedule_of(made.cut, "1f1b", 1), 1)
    assert "rank 1, action 1FB0" in str(caught.value)


def test_what_the_next_stage_of_the_same_rank_gets_is_dense() -> None:
    """One rank with both stages: no message, and values have the strides with which they would arrive."""
    made = chain(2)
    (program,) = programs_of(made, "interleaved-1f1b", 1, ranks=1)
    assert str(program).startswith("rank 0 of 1: stages 0, 1, 1 microbatches")
    assert [str(step) for step in program.instructions if isinstance(step, HandOver)] == [
        "%6 = hand over 0>1 of microbatch 0 (%3)",
        "%13 = hand over 1>0 of microbatch 0 (%12)",
    ]
    step = next(step for step in program.instructions if isinstance(step, HandOver))
    operation = link(
        step, Context(program, (made.cut,), {}, VirtualTransport(VirtualNetwork()), torch.device("cpu"), None)
    )
    state = State([torch.randn(2, 3).t()] * program.registers, [], [], [], {})
    operation(state)
    assert [place for place, one in enumerate(state.registers) if one.is_contiguous()] == [6]


def test_sizes_go_by_the_names_of_the_other_programs() -> None:
    case = ZOO["encoder_decoder"]
    compiler = GraphCompiler(case.build(), case.loss_fn, Plan(stages=2, backend="eager", quiet=True))
    joint = str(compiler.capture(case.microbatches(1)[0]))
    named = {line.split(" = ")[1] for line in joint.splitlines() if " = size " in line}
    ranks = compiler.lower().ranks
    assert named == {"size s0", "size s1", "size s2"}
    for rank, expected in zip(ranks, ({"size s0", "size s1"}, named), strict=True):
        binds = [line.split(" = ")[1] for line in str(rank).splitlines() if " = size " in line]
        assert {bind.partition(" of ")[0] for bind in binds} == expected


def test_proven_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank makes the programs of the others only to show that they do not hold each other up: once for each order."""
    lowered: list[int] = []
    proofs: list[int] = []

    def noted(cuts: Any, schedule: Any, rank: int, *rest: Any) -> RankProgram:
        lowered.append(rank)
        return lower(cuts, schedule, rank, *rest)

    def proven(programs: Any, placement: Any) -> int:
        proofs.append(len(programs))
        return prove(programs, placement)

    monkeypatch.setattr(compiler_module, "lower", noted)
    monkeypatch.setattr(compiler_module, "prove", proven)
    case = ZOO["mlp"]
    compiler = GraphCompiler(case.build(), case.loss_fn, Plan(stages=2, backend="eager", quiet=True))
    first, second, other = (
        (compiler.capture(case.microbatches(1)[0], training=training), compiler.partition())[1]
        for training in (True, True, False)
    )
    for cuts, ranks, proof in (
        ([first, second], [0, 1], [2]),
        ([first, second], [1], []),
        ([second, second], [1], []),  # others that send the same
        ([first, second, second], [0, 1], [2]),  # another number
        ([first, other, first], [0, 1], [2]),  # one that has no backward
        ([other, first, first], [0, 1], [2]),
        ([second, other, first], [1], []),
    ):
        lowered.clear(), proofs.clear()
        found = compiler.lower(cuts, rank=1)
        assert (lowered, proofs, [one.rank for one in found.ranks]) == (ranks, proof, [1])
    assert [one.rank for one in compiler.lower([first, second]).ranks] == [0, 1]


def test_a_step_without_data_ranks_is_lowered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []

    def noted(cuts: Any, *rest: Any) -> RankProgram:
        counts.append(len(cuts))
        return lower(cuts, *rest)

    monkeypatch.setattr(compiler_module, "lower", noted)
    case = ZOO["mlp"]
    step = compile_train_step(case.build(), case.loss_fn, plan=Plan(backend="eager", quiet=True))
    for batches in (case.microbatches(2), case.microbatches(3), case.microbatches(2)):
        step(batches)
    assert counts == [2, 3]
