"""Messages: what travels, what is counted, what is noticed."""

from __future__ import annotations

import dataclasses
import socket
from typing import Any

import pytest
import torch
import torch.distributed as dist

from graphcomp.errors import AgreementError
from graphcomp.ir.signature import Activation, BatchLeaf
from graphcomp.partition.stages import Boundary
from graphcomp.runtime.program import transport as transport_module
from graphcomp.runtime.program.channel import Channel
from graphcomp.runtime.program.executor import RankExecutor, run_virtual_ranks
from graphcomp.runtime.program.instructions import Edge
from graphcomp.runtime.program.lower import lower
from graphcomp.runtime.program.transport import (
    MOST_BYTES,
    ProcessTransport,
    VirtualNetwork,
    VirtualTransport,
    payload,
)
from graphcomp.runtime.ranks.layout import channels_of
from graphcomp.testing.ranks import run_ranks
from tests.runtime.chain import WIDTH, callables_of, chain, executors_of, programs_of, run, schedule_of

EDGE = Edge(0, 1)


def values() -> list[torch.Tensor]:
    """Ranks 0 to 5, every kind of dtype, empty and strided."""
    return [
        torch.tensor(1.5),
        torch.arange(6.0).view(2, 3).t(),
        torch.tensor([True, False, True]),
        torch.tensor(7, dtype=torch.int16),
        torch.arange(4, dtype=torch.int64),
        torch.zeros(0, 3),
        torch.randn(2, 1, 2, 1, 2, dtype=torch.float64),
        torch.ones(3, dtype=torch.bfloat16),
        torch.tensor([1 + 2j, 3 - 1j]).conj(),
        torch.ones(1, 4).expand(3, 4),
    ]


def test_payloads_are_dense_and_of_a_dtype_that_travels() -> None:
    for value in values():
        sent = payload(value)
        assert sent.is_contiguous()
        assert sent.nbytes == max(1, value.numel() * value.element_size())
    dense = torch.ones(3)
    assert payload(dense) is dense
    flags = torch.zeros(3, dtype=torch.bool)
    payload(flags)[1] = 1  # a receive writes through it
    assert flags.tolist() == [False, True, False]


def test_virtual_messages_arrive_as_copies_and_are_counted() -> None:
    network = VirtualNetwork()
    sender, receiver = VirtualTransport(network), VirtualTransport(network)
    sent = values()
    receive = receiver.post_receive(EDGE, 0, [torch.empty(v.shape, dtype=v.dtype) for v in sent])
    assert not receive.ready()
    sender.send(EDGE, 0, sent)
    assert receive.ready()
    for got, value in zip(receive.wait(), sent, strict=True):
        assert torch.equal(got, value)
        assert got.is_contiguous()
    assert sender.messages == len(sent)
    assert sender.bytes_sent == sum(payload(value).nbytes for value in sent)
    assert receiver.messages == 0


@pytest.mark.parametrize("wrong", [torch.zeros(3), torch.zeros(2, dtype=torch.float64)])
def test_a_virtual_receiver_notices_another_message(wrong: torch.Tensor) -> None:
    transport = VirtualTransport(VirtualNetwork())
    transport.send(EDGE, 0, [wrong])
    with pytest.raises(AgreementError, match="edge 0>1, microbatch 0"):
        transport.post_receive(EDGE, 0, [torch.zeros(2)]).wait()


def test_a_virtual_receiver_notices_another_order() -> None:
    transport = VirtualTransport(VirtualNetwork())
    transport.send(EDGE, 1, [torch.zeros(2)])
    with pytest.raises(AgreementError, match="not the one that was expected"):
        transport.post_receive(EDGE, 0, [torch.zeros(2)]).wait()


@pytest.mark.parametrize(
    ("result", "got"),
    [(torch.zeros(5, WIDTH), "float32[5, 3]"), (torch.zeros(2, WIDTH).double(), "float64[2, 3]")],
)
def test_what_is_not_as_planned_is_not_sent(result: torch.Tensor, got: str) -> None:
    made = chain(2)
    made.callables[0, "forward"] = lambda w, b, x: [result, x, x]
    with pytest.raises(AgreementError, match="value 'h' is not what the plan says") as caught:
        run(made, "1f1b", [torch.randn(2, WIDTH)])
    message = str(caught.value)
    assert "edge 0>1, microbatch 0" in message
    assert "expected: float32[2, 3]" in message
    assert f"got: {got}" in message


def test_a_boundary_without_values_sends_nothing() -> None:
    """Stage 1 reads the batch itself; only the gradient of a boundary that exists would travel."""
    made = chain(2, trainable_from=1)
    last = made.cut.stages[1]
    for program in (last.forward, last.fused):
        roles = tuple(BatchLeaf("x") if isinstance(role, Activation) else role for role in program.inputs)
        program.set_signature(roles, program.outputs)
    cut = dataclasses.replace(made.cut, forward_boundaries={0: Boundary(0, 1, ())})
    schedule = schedule_of(cut, "1f1b", 2)
    network = VirtualNetwork()
    named = callables_of(made)
    executors = [
        RankExecutor(lower([cut] * 2, schedule, rank), [cut], named, VirtualTransport(network)) for rank in range(2)
    ]
    for executor in executors:
        executor.begin(made.inputs([torch.randn(2, WIDTH)] * 2))
    assert [one.messages for one in run_virtual_ranks(executors)] == [0, 0]


Trained = tuple[dict[str, torch.Tensor], int]


class Untouched:
    """A process group that nothing is given to."""

    def send(self, *given: Any) -> Any:
        raise AssertionError("sent over the group")

    recv = send


@pytest.mark.parametrize(("sizes", "small"), [((MOST_BYTES,), True), ((MOST_BYTES, 1), False), ((9, 9), True)])
def test_both_sides_know_which_way_a_message_goes(sizes: tuple[int, ...], small: bool) -> None:
    group, ends = Untouched(), socket.socketpair()
    channels = [Channel(end, 0, 30.0) for end in ends]
    sender, receiver = (
        ProcessTransport((group, group), [0, 1], channels={0: [one], 1: [one]})
        for one in channels  # type: ignore[arg-type]
    )
    sent = [torch.full((size,), 7, dtype=torch.uint8) for size in sizes]
    buffers = [torch.empty_like(value) for value in sent]
    if small:
        handle = sender.send(EDGE, 0, sent)
        assert handle.done()
        handle.wait()
        got = receiver.post_receive(EDGE, 0, buffers).wait()
        assert all(torch.equal(*each) for each in zip(got, sent, strict=True))
    for call, values in ((sender.send, sent), (receiver.post_receive, buffers)) if not small else ():
        with pytest.raises(AssertionError, match="over the group"):
            call(EDGE, 0, values)
    assert (sender.messages, sender.bytes_sent) == (len(sizes), sum(sizes))
    for one in channels:
        one.close()


def exchange(transport: ProcessTransport, rank: int) -> list[torch.Tensor]:
    """Rank 0 sends every kind of value to rank 1, and gets one back."""
    torch.manual_seed(1)
    sent, back = values(), Edge(1, 0)
    if rank == 0:
        transport.send(EDGE, 0, sent).wait()
        assert transport.messages == len(sent)
        return list(transport.post_receive(back, 0, [torch.empty(2)]).wait())
    got = list(transport.post_receive(EDGE, 0, [torch.empty(v.shape, dtype=v.dtype) for v in sent]).wait())
    transport.send(back, 0, [torch.arange(2.0)]).wait()
    return got


def train(transport: ProcessTransport, rank: int, stages: int, name: str, microbatches: int) -> Trained:
    """The second of two steps on this rank."""
    made = chain(stages, tied=(0, stages - 1))
    torch.manual_seed(5)
    inputs = made.inputs([torch.randn(2 + number, WIDTH) for number in range(microbatches)])
    program = programs_of(made, name, microbatches)[rank]
    named = callables_of(made)
    executor = RankExecutor(program, [made.cut], named, transport)
    executor.run(inputs)
    result = executor.run(inputs)
    return dict(result.gradients[rank]), result.messages


def process(rank: int, stages: int, cases: list[tuple[str, int]], channels: bool) -> tuple[Any, list[Trained]]:
    """channels: all goes over them; otherwise over the groups."""
    ranks = list(range(stages))
    groups = dist.new_group(ranks), dist.new_group(ranks)
    made = channels_of(rank, ranks, 1, 60.0, dist.group.WORLD) if channels else {}
    transport = ProcessTransport(groups, ranks, channels=made)
    transport_module.MOST_BYTES = 1 << 60
    assert sorted(made) == sorted({(rank + 1) % stages, (rank - 1) % stages}) * channels
    exchanged = exchange(transport, rank) if rank < 2 else []
    return exchanged, [train(transport, rank, stages, *case) for case in cases]


@pytest.mark.gloo
@pytest.mark.parametrize(("stages", "cases"), [(2, [("1f1b", 5), ("gpipe", 3), ("1f1b", 0)]), (3, [("1f1b", 4)])])
@pytest.mark.parametrize("channels", [False, True], ids=["groups", "channels"])
def test_processes_equal_virtual_ranks(stages: int, cases: list[tuple[str, int]], channels: bool) -> None:
    processes = run_ranks(process, stages, stages, cases, channels)
    torch.manual_seed(1)
    assert processes[0][0][0].tolist() == [0.0, 1.0]
    for got, value in zip(processes[1][0], values(), strict=True):
        assert got.dtype == value.dtype
        assert torch.equal(got, value)
    for number, (name, microbatches) in enumerate(cases):
        made = chain(stages, tied=(0, stages - 1))
        torch.manual_seed(5)
        inputs = made.inputs([torch.randn(2 + number, WIDTH) for number in range(microbatches)])
        virtual = run_virtual_ranks(executors_of(made, programs_of(made, name, microbatches), inputs))
        for rank, (_, trained) in enumerate(processes):
            gradients, messages = trained[number]
            wanted = virtual[rank].gradients[rank]
            assert messages == virtual[rank].messages
            assert gradients.keys() == wanted.keys()
            assert all(torch.equal(grad, wanted[key]) for key, grad in gradients.items())
