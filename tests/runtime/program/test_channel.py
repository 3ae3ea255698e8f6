"""Channels: what arrives, in which order, who waits for whom, and how they end."""

from __future__ import annotations

import errno
import gc
import os
import random
import signal
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from graphcomp.runtime.program.channel import Channel, PeerLate, PeerLost
from graphcomp.runtime.program.transport import payload

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int8, torch.bool, torch.complex64)
MEGABYTE = 1 << 20


def pair(deadline: float = 30.0, room: int | None = None, awake: float = 0.0) -> tuple[Channel, Channel]:
    """Both ends. room: bytes that the kernel keeps for each, as few as it lets one have."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    for end in ends if room else ():
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, room or 0)
    one, two = (Channel(end, peer, deadline, awake) for end, peer in zip(ends, (1, 0), strict=True))
    return one, two


@pytest.fixture(params=[0.0, 30.0], ids=["asleep", "awake"])
def ends(request: pytest.FixtureRequest) -> Iterator[tuple[Channel, Channel]]:
    made = pair(awake=request.param)
    yield made
    for one in made:
        one.close()


class Failing(socket.socket):
    """Calls `instead` once, in place of one of its methods or after it."""

    instead: Callable[[], Any] | None = None
    method = ""

    def _passed(self, method: str) -> None:
        if self.method == method and self.instead is not None:
            call, self.instead = self.instead, None
            call()

    def send(self, *given: Any) -> int:
        self._passed("send")
        return super().send(*given)

    def sendall(self, *given: Any) -> None:
        self._passed("sendall")
        return super().sendall(*given)

    def recv_into(self, *given: Any) -> int:
        count = super().recv_into(*given)
        self._passed("recv_into")
        return count


def failing(method: str, instead: Callable[[], Any], deadline: float = 30.0) -> tuple[Channel, Channel]:
    """Both ends; that of the first rank has the socket that fails."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    broken = Failing(fileno=ours.detach())
    broken.method, broken.instead = method, instead
    return Channel(broken, 1, deadline), Channel(theirs, 0, deadline)


def raising(error: BaseException) -> Callable[[], Any]:
    def instead() -> None:
        raise error

    return instead


@contextmanager
def alarms(handler: Callable[..., Any], first: float, then: float = 0.0) -> Iterator[None]:
    """SIGALRM after so many seconds, and again and again."""
    before = signal.signal(signal.SIGALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, first, then)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def message(number: int, sizes: tuple[int, ...]) -> list[torch.Tensor]:
    """Random bits, of dtypes in turn."""
    draw = torch.Generator().manual_seed(number)
    found = []
    for place, size in enumerate(sizes):
        dtype = DTYPES[(number + place) % len(DTYPES)]
        bits = torch.randint(0, 2 if dtype is torch.bool else 256, (size, dtype.itemsize), generator=draw)
        found.append(payload(bits.to(torch.uint8).view(dtype).squeeze(1)))
    return found


def same(one: torch.Tensor, two: torch.Tensor) -> bool:
    return one.dtype == two.dtype and torch.equal(one.view(torch.uint8), two.view(torch.uint8))


@pytest.mark.parametrize("room", [None, 1])
@pytest.mark.parametrize("posted", [True, False], ids=["posted before", "posted after"])
def test_messages_arrive_bit_by_bit_in_the_order_of_sending(room: int | None, posted: bool) -> None:
    """Small and large ones; with next to no room, most of them in pieces and by the thread."""
    one, two = pair(room=room)
    draw = random.Random(1)
    sent = [
        message(number, tuple(draw.choice((1, 7, 1000, 200_000)) for _ in range(draw.choice((1, 1, 3)))))
        for number in range(30)
    ]
    buffers = [[torch.empty_like(value) for value in values] for values in sent]
    receives = [two.post(each) for each in buffers] if posted else []
    for values in sent:
        one.send(values)
    receives = receives or [two.post(each) for each in buffers]
    receives[17].wait()  # and with it those before, whoever waits for them
    assert all(
        same(*each)
        for got, values in zip(buffers[:18], sent[:18], strict=True)
        for each in zip(got, values, strict=True)
    )
    for receive in reversed(receives):
        receive.wait()
    assert all(same(*each) for got, values in zip(buffers, sent, strict=True) for each in zip(got, values, strict=True))
    one.send([torch.ones(1)])  # by the main thread again
    two.post([last := torch.zeros(1)]).wait()
    assert last.item() == 1
    one.close()
    two.close()


def test_both_directions_at_once_with_no_room_left(ends: tuple[Channel, Channel]) -> None:
    for number, end in enumerate(ends):
        for part in range(8):
            end.send([torch.full((MEGABYTE,), 10 * number + part, dtype=torch.uint8)])
    for number, end in enumerate(ends):
        buffers = [torch.empty(MEGABYTE, dtype=torch.uint8) for _ in range(8)]
        for part, buffer in enumerate(buffers):
            end.post([buffer]).wait()
            assert (buffer == 10 * (1 - number) + part).all()


def test_what_is_sent_may_be_changed_at_once(ends: tuple[Channel, Channel]) -> None:
    """Also what the kernel had no room for."""
    sent = torch.zeros(MEGABYTE)
    ends[0].send([sent])
    sent.fill_(1)
    ends[1].post([got := torch.ones(MEGABYTE)]).wait()
    assert not got.any()


def test_a_peer_gets_all_while_the_sender_does_something_else(ends: tuple[Channel, Channel]) -> None:
    """In a collective of other ranks, say, which wait for this very peer."""
    ends[0].send([torch.ones(MEGABYTE)])
    ends[0].post([torch.empty(1)])
    ends[1].post([got := torch.zeros(MEGABYTE)]).wait()
    assert got.all()


def test_a_message_of_nothing(ends: tuple[Channel, Channel]) -> None:
    ends[0].send([])
    ends[1].post([]).wait()
    ends[0].send([torch.ones(1)])
    ends[1].post([got := torch.zeros(1)]).wait()
    assert got.item() == 1


def test_a_peer_that_closes() -> None:
    """What it had sent before arrives; what was on its way to it does not hold it up."""
    one, two = pair()
    one.send([torch.ones(3)])
    one.send([torch.ones(MEGABYTE)])
    two.send([torch.ones(MEGABYTE)])
    one.close()
    two.post([got := torch.zeros(3)]).wait()
    assert got.all()
    with pytest.raises(PeerLost, match=r"Connection (closed|reset) by peer, rank 0"):
        two.post([torch.zeros(2 * MEGABYTE)]).wait()
    with pytest.raises(PeerLost, match="rank 0"):
        for _ in range(100):  # until the thread has met the same
            two.send([torch.ones(3)])
            time.sleep(0.05)
    two.close()
    assert not any("graphcomp sends" in thread.name for thread in threading.enumerate())


@pytest.mark.parametrize("closing", [0, 1], ids=["this rank's end", "the peer's end"])
def test_closing_ends_a_wait(ends: tuple[Channel, Channel], closing: int) -> None:
    timer = threading.Timer(0.1, ends[closing].close)
    timer.start()
    with pytest.raises(PeerLost, match="Connection closed by peer, rank 1"):
        ends[0].post([torch.zeros(1)]).wait()
    timer.join()


@pytest.mark.parametrize("awake", [0.0, 0.1, 30.0])
def test_a_peer_that_does_not_come(awake: float) -> None:
    one, two = pair(deadline=0.2, awake=awake)
    one.send([torch.ones(1)])
    begun = time.monotonic()
    with pytest.raises(PeerLate, match="Timed out waiting 200ms for a message from rank 0"):
        two.post([torch.zeros(2)]).wait()
    assert time.monotonic() - begun >= 0.2
    with pytest.raises(PeerLost, match="rank 1"):  # the rest would be taken for a message of its own
        one.send([torch.ones(1)])
    one.close()
    two.close()


def test_neither_signals_nor_parts_put_the_deadline_off() -> None:
    """Signals come in all the time, and now and then a byte."""
    one, two = pair(deadline=0.5)
    came: list[int] = []

    def byte(*given: Any) -> None:
        came.append(1)
        if len(came) % 5 == 0:
            one.send([torch.ones(1, dtype=torch.uint8)])

    end = threading.Timer(60, one.close)  # so that a test that fails ends
    end.start()
    with alarms(byte, 0.02, 0.02), pytest.raises(PeerLate, match="500ms"):
        two.post([torch.zeros(MEGABYTE)]).wait()
    end.cancel()
    assert came
    one.close()
    two.close()


def test_ctrl_c_ends_a_wait(ends: tuple[Channel, Channel], ctrl_c: None) -> None:
    main = threading.main_thread().ident or 0
    timer = threading.Timer(0.1, signal.pthread_kill, (main, signal.SIGINT))
    timer.start()
    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        ends[0].post([torch.zeros(1)]).wait()
    assert time.monotonic() - begun < ends[0].deadline
    timer.join()


def test_after_half_a_message_nothing_is_taken_for_the_other_half(ends: tuple[Channel, Channel]) -> None:
    ends[0].send([torch.ones(1)])
    wait = ends[1].post([torch.zeros(2)]).wait
    with alarms(lambda *given: 1 / 0, 0.2), pytest.raises(ZeroDivisionError):
        wait()
    with pytest.raises(PeerLost, match="division by zero, rank 0"):
        wait()
    with pytest.raises(PeerLost, match="rank 1"):
        ends[0].send([torch.ones(1)])


NO_BUFFERS = OSError(errno.ENOBUFS, "No buffer space available")


@pytest.mark.parametrize("error", [NO_BUFFERS, MemoryError()], ids=["kernel", "python"])
def test_an_error_of_the_thread_that_sends_is_raised_at_both_ends(error: Exception) -> None:
    """Later messages do not take the place of what is lost."""
    one, two = failing("sendall", raising(error), deadline=5.0)
    one.send([torch.ones(MEGABYTE)])
    with pytest.raises(PeerLost, match="closed by peer, rank 0"):
        two.post([torch.ones(MEGABYTE)]).wait()
    for again in (lambda: one.send([torch.ones(1)]), one.post([torch.ones(1)]).wait):
        with pytest.raises(PeerLost, match=r"(No buffer space available|MemoryError), rank 1"):
            again()
    one.close()
    two.close()
    assert not any("graphcomp sends" in thread.name for thread in threading.enumerate())


@pytest.mark.parametrize("number", [errno.ENOBUFS, errno.ENOMEM])
def test_a_kernel_without_memory_for_now_loses_nothing(number: int) -> None:
    one, two = failing("send", raising(OSError(number, "none")))
    for value in (1, 2):
        one.send([torch.tensor([value])])
    two.post([got := torch.zeros(2, dtype=torch.int64)]).wait()
    assert got.tolist() == [1, 2]
    one.close()
    two.close()


def test_no_thread_to_send_with(ends: tuple[Channel, Channel], monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", lambda self: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            ends[0].send([torch.ones(MEGABYTE)])
    with pytest.raises(PeerLost, match="division by zero, rank 1"):
        ends[0].send([torch.ones(1)])
    with pytest.raises(PeerLost, match="closed by peer, rank 0"):
        ends[1].post([torch.ones(MEGABYTE)]).wait()


def test_dropped_between_two_payloads() -> None:
    """As by another thread."""
    one, two = failing("recv_into", lambda: one.drop())
    two.send([torch.ones(1)])
    with pytest.raises(PeerLost, match="rank 1"):
        one.post([torch.zeros(1), torch.zeros(1)]).wait()
    two.close()


def test_what_is_posted_is_kept_until_it_has_come(ends: tuple[Channel, Channel]) -> None:
    """Nobody holds the first buffer any more when its bytes come."""
    buffer = torch.zeros(1000)
    kept = weakref.ref(buffer)
    ends[0].post([buffer])
    del buffer
    ends[1].send([torch.ones(1000), torch.full((1,), 2.0)])
    assert kept() is not None
    ends[0].post([got := torch.zeros(1)]).wait()
    assert got.item() == 2 and kept() is None


def test_a_signal_that_raises_nothing_does_not_end_a_wait(ends: tuple[Channel, Channel]) -> None:
    came: list[int] = []
    timer = threading.Timer(0.3, ends[1].send, ([torch.ones(3)],))
    timer.start()
    with alarms(lambda number, frame: came.append(number), 0.02, 0.02):
        ends[0].post([got := torch.zeros(3)]).wait()
    assert got.all() and came
    timer.join()


def descriptors() -> int:
    folder = Path("/proc/self/fd")
    if not folder.exists():
        pytest.skip("this system does not say which descriptors are open")
    return len(list(folder.iterdir()))


def test_no_descriptor_is_left() -> None:
    gc.collect()
    before = descriptors()
    one, two = pair()
    assert descriptors() == before + 2
    one.close()
    one.close()
    assert descriptors() == before + 1
    del two  # nobody has closed it
    gc.collect()
    assert descriptors() == before


def test_a_forked_child_does_not_keep_a_channel_open() -> None:
    """Such as a data loader's process, which lives on when a rank is killed."""
    one, two = pair()
    hold, leave = os.pipe()
    child = os.fork()
    if not child:
        os.close(leave)
        os.read(hold, 1)
        os._exit(0)
    one.drop()  # as the end of this process would
    with pytest.raises(PeerLost, match="closed by peer"):
        two.post([torch.zeros(1)]).wait()
    two.close()
    os.close(leave)
    os.close(hold)
    assert os.waitpid(child, 0)[1] == 0
