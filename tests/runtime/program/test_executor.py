"""Rank programs on virtual ranks against the plain loop."""

from __future__ import annotations

import dataclasses
import weakref

import pytest
import torch

from graphcomp.errors import StepError, VerifyError
from graphcomp.runtime.program.executor import RankExecutor, run_virtual_ranks
from graphcomp.runtime.program.inputs import MicrobatchInputs, StepInputs
from graphcomp.runtime.program.instructions import WaitReceive
from graphcomp.runtime.program.transport import VirtualNetwork, VirtualTransport
from graphcomp.schedule.registry import KNOWN
from tests.runtime.chain import (
    WIDTH,
    Chain,
    callables_of,
    chain,
    executors_of,
    plain_loop,
    programs_of,
    run,
    staged_loop,
)


def batches(*rows: int) -> list[torch.Tensor]:
    return [torch.randn(count, WIDTH) for count in rows]


@pytest.mark.parametrize("microbatches", [0, 1, 2, 3, 5])
@pytest.mark.parametrize("name", KNOWN)
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_every_schedule_equals_the_plain_loop(stages: int, name: str, microbatches: int) -> None:
    made, given = chain(stages), batches(*(2 + number for number in range(microbatches)))
    staged, eager = staged_loop(made, given), plain_loop(made, given)
    for fused in (True, False):
        outcome = run(made, name, given, fused)
        assert outcome.gradients.keys() == staged.gradients.keys()
        for parameter, grad in staged.gradients.items():
            assert torch.equal(outcome.gradients[parameter], grad)
            torch.testing.assert_close(grad, eager.gradients[parameter], rtol=1e-6, atol=1e-6)
        for got, wanted in (
            (outcome.losses, staged.losses),
            (outcome.losses, eager.losses),
            (outcome.metrics, staged.metrics),
        ):
            assert [float(value) for value in got] == [float(value) for value in wanted]


@pytest.mark.parametrize("name", KNOWN)
def test_stages_without_anything_to_train_run_no_backward(name: str) -> None:
    made, given = chain(4, trainable_from=2), batches(2, 3, 4)
    outcome, staged = run(made, name, given), staged_loop(made, given)
    assert outcome.gradients.keys() == {"w2", "b2", "w3", "b3"}
    assert all(torch.equal(outcome.gradients[key], grad) for key, grad in staged.gradients.items())
    assert outcome.messages == [3, 3, 3, 3]  # the gradient goes up one cut only


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 1), (2, 5), (4, 2), (4, 7)])
def test_one_message_a_cut_and_microbatch(stages: int, microbatches: int) -> None:
    outcome = run(chain(stages), "1f1b", batches(*[2] * microbatches))
    ends = [microbatches, microbatches]
    assert outcome.messages == [ends[0], *[2 * microbatches] * (stages - 2), ends[1]]


def test_a_microbatch_without_rows_adds_nothing() -> None:
    made, given = chain(3), batches(2, 0, 3)
    outcome, without = run(made, "1f1b", given), run(made, "1f1b", [given[0], given[2]])
    assert float(outcome.losses[1]) == 0.0
    assert outcome.messages == [3, 6, 3]
    for name, grad in without.gradients.items():
        assert torch.equal(outcome.gradients[name], grad)


@pytest.mark.parametrize("name", KNOWN)
def test_a_buffer_goes_from_microbatch_to_microbatch(name: str) -> None:
    made = chain(2, counted=True)
    outcome = run(made, name, batches(2, 2, 2))
    assert {key: int(value) for key, value in outcome.buffers.items()} == {"c0": 43, "c1": 43}
    assert {int(value) for value in made.buffers.values()} == {40}  # committing is the caller's


def test_the_same_executor_runs_again() -> None:
    made, given = chain(3), batches(2, 3)
    executors = executors_of(made, programs_of(made, "1f1b", 2), made.inputs(given))
    first = run_virtual_ranks(executors)
    for executor in executors:
        executor.begin(made.inputs(given))
    second = run_virtual_ranks(executors)
    for one, other in zip(first, second, strict=True):
        for stage, named in one.gradients.items():
            for key, grad in named.items():
                assert torch.equal(grad, other.gradients[stage][key])
                assert grad.data_ptr() != other.gradients[stage][key].data_ptr()


def test_gradients_accumulate_in_the_named_dtype() -> None:
    made, given = chain(2), batches(2, 3, 4)
    executors = executors_of(made, programs_of(made, "1f1b", 3), made.inputs(given), torch.float64)
    results = run_virtual_ranks(executors)
    for name, grad in plain_loop(made, given).gradients.items():
        got = results[int(name[1:])].gradients[int(name[1:])][name]
        assert got.dtype is torch.float64
        torch.testing.assert_close(got, grad.double(), rtol=1e-6, atol=1e-6)


class Watch:
    """Counts, at every call, which microbatches' saved values are alive on a stage."""

    def __init__(self, made: Chain, stage: int) -> None:
        self.alive: list[weakref.ref[torch.Tensor]] = []
        self.most = 0
        self.during_backward: list[bool] = []
        self.forward, self.backward = made.callables[stage, "forward"], made.callables[stage, "backward"]

    def run_forward(self, box: list[torch.Tensor]) -> list[torch.Tensor]:
        inputs = list(box)
        box.clear()
        head, x, h = self.forward(*inputs)
        h = h.clone()  # the saved value alone, not the one that is sent
        self.alive.append(weakref.ref(h))
        self.most = max(self.most, sum(one() is not None for one in self.alive))
        return [head, x, h]

    def run_backward(self, box: list[torch.Tensor]) -> list[torch.Tensor]:
        w, x, h, arrived, *accumulators = box
        box.clear()
        results = self.backward(w, x, h, arrived)
        for accumulator, gradient in zip(accumulators, results[-2:], strict=True):
            accumulator += gradient
        watched = weakref.ref(h)
        del h
        self.during_backward.append(watched() is None)  # nobody but the callee held it
        return list(results)


HELD = [
    ("1f1b", lambda p, s: p - s),
    ("eager-1f1b", lambda p, s: 2 * (p - 1 - s) + 1),
    ("gpipe", lambda p, s: 8),
]


@pytest.mark.parametrize(("name", "held"), HELD)
def test_saved_values_live_until_their_backward_takes_them(name: str, held: object) -> None:
    stages, given = 4, batches(*[2] * 8)
    made = chain(stages)
    network = VirtualNetwork()
    watches = {stage: Watch(made, stage) for stage in range(stages - 1)}
    named = callables_of(made)
    for stage, watch in watches.items():
        named[0, stage, "forward"], named[0, stage, "backward"] = watch.run_forward, watch.run_backward
    executors = [
        RankExecutor(program, [made.cut], named, VirtualTransport(network)) for program in programs_of(made, name, 8)
    ]
    for _ in range(2):  # also in a later step
        for executor in executors:
            executor.begin(made.inputs(given))
        run_virtual_ranks(executors)
    for stage, watch in watches.items():
        assert watch.most == held(stages, stage)  # type: ignore[operator]
        assert watch.during_backward == [True] * 16


def test_an_error_keeps_its_type_and_says_where() -> None:
    made = chain(3)
    calls = []

    def fails(*inputs: torch.Tensor) -> list[torch.Tensor]:
        calls.append(inputs)
        if len(calls) == 2:
            raise ZeroDivisionError("user code")
        return list(backward(*inputs))

    backward = made.callables[1, "backward"]
    made.callables[1, "backward"] = fails
    with pytest.raises(ZeroDivisionError, match="user code") as caught:
        run(made, "1f1b", batches(2, 2, 2))
    assert caught.value.__notes__ == ["in rank 1, stage 1, microbatch 1, action 1B1"]


def test_a_step_after_an_error_finds_nothing_of_it() -> None:
    made, given = chain(2), batches(2, 2)
    real, broken = made.callables[1, "fused"], []

    def fails_once(*inputs: torch.Tensor) -> list[torch.Tensor]:
        if not broken:
            broken.append(True)
            raise ZeroDivisionError
        return list(real(*inputs))

    made.callables[1, "fused"] = fails_once
    executors = executors_of(made, programs_of(made, "1f1b", 2), made.inputs(given))
    with pytest.raises(ZeroDivisionError):
        run_virtual_ranks(executors)
    for executor in executors:
        executor.begin(made.inputs(given))
    result = run_virtual_ranks(executors)[0]
    assert torch.equal(result.gradients[0]["w0"], staged_loop(chain(2), given).gradients["w0"])


def test_ranks_that_wait_for_each_other_are_noticed() -> None:
    made, given = chain(2), batches(2, 2)
    programs = programs_of(made, "1f1b", 2)
    silent = [one for one in programs[0].instructions if not str(one).startswith("send 0>1 of microbatch 1")]
    programs[0] = dataclasses.replace(programs[0], instructions=tuple(silent))
    with pytest.raises(StepError, match="wait for each other") as caught:
        run_virtual_ranks(executors_of(made, programs, made.inputs(given)))
    assert "rank 0 at: " in str(caught.value) and "= wait 1>0 of microbatch 1" in str(caught.value)
    assert "rank 1 at: " in str(caught.value) and "= wait 0>1 of microbatch 1" in str(caught.value)


def test_a_virtual_rank_alone_cannot_finish() -> None:
    made, given = chain(2), batches(2)
    executor = executors_of(made, programs_of(made, "1f1b", 1), made.inputs(given))[0]
    with pytest.raises(StepError, match="cannot run alone"):
        executor.run(made.inputs(given))
    with pytest.raises(StepError, match="has not come to its end"):
        executor.result()
    assert isinstance(executor.program.instructions[executor.progress], WaitReceive)


def test_what_a_step_lacks_is_named() -> None:
    made, given = chain(1), batches(2)
    program = programs_of(made, "1f1b", 1)[0]
    (executor,) = executors_of(made, [program], made.inputs(given))
    with pytest.raises(StepError, match="another number of microbatches"):
        executor.begin(made.inputs(batches(2, 2)))
    with pytest.raises(StepError, match="not given 'w0'"):
        executor.begin(StepInputs([MicrobatchInputs({"x": given[0]}, {})]))
    with pytest.raises(StepError, match="not given 'loss'"):
        executor.begin(dataclasses.replace(made.inputs(given), denominators={}))
    with pytest.raises(StepError, match="no step has begun"):
        RankExecutor(program, [made.cut], {(0, 0, "fused"): list}, VirtualTransport(VirtualNetwork())).advance()
    with pytest.raises(VerifyError, match="no callable for fused of stage 0"):
        RankExecutor(program, [made.cut], {}, VirtualTransport(VirtualNetwork()))
