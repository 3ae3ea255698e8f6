"""Small messages between two ranks of one machine, over a stream socket.

A process group hands each message to a thread, which sends it when the receiver has told where to put it: that is more
work than a small stage has. A socket takes a small message at once, and who waits for it reads it in his own thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import select
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

_HOW = getattr(socket, "MSG_NOSIGNAL", 0)
_AT_ONCE = getattr(socket, "MSG_DONTWAIT", 0)
_NO_ROOM = {errno.EAGAIN, errno.EWOULDBLOCK, errno.ENOBUFS, errno.ENOMEM}
_DAY = 86400.0
"""Seconds of one look for a message: the kernel counts no more than a few weeks."""

_memory = ctypes.pythonapi.PyMemoryView_FromMemory
_memory.argtypes, _memory.restype = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int), ctypes.py_object
_WRITABLE = 0x200  # PyBUF_WRITE


class PeerLost(RuntimeError):
    """The other rank is gone, or one of both has closed its end."""


class PeerLate(RuntimeError):
    """What was waited for did not come from the other rank until the deadline."""


class Channel:
    """This rank's end of what it and another rank send each other: in each direction, in the order of sending.

    Bytes carry no mark of the message that they belong to. So whatever raises within a send or a wait, a signal handler
    too, ends the channel at both ends: from then on they raise PeerLost, with that reason at this one.

    connection: a connected stream socket, which the channel takes over. peer: the other rank, for messages. deadline:
    seconds that a wait may take. awake: seconds that a wait keeps its core busy before it sleeps: to be woken takes as
    long as a small operation, and where two stages are as fast as each other every message is waited for.
    """

    def __init__(self, connection: socket.socket, peer: int, deadline: float, awake: float = 0.0) -> None:
        self.peer, self.deadline, self.awake, self._socket = peer, deadline, awake, connection
        connection.setblocking(True)
        self._arrival = select.poll()
        self._arrival.register(connection, select.POLLIN)
        self._posted: deque[torch.Tensor] = deque()
        self._taken = 0
        self._unsent: deque[bytes] = deque()
        self._sending: threading.Thread | None = None
        self._ended: str | None = None
        self._sends, self._takes = threading.Lock(), threading.Lock()
        self._end = weakref.finalize(self, connection.close)
        _OPEN.add(self)

    def send(self, payloads: Sequence[torch.Tensor]) -> None:
        """Send dense tensors on CPU. Waits for nobody, and needs their memory no longer."""
        parts = [_bytes(one) for one in payloads]
        whole = parts[0] if len(parts) == 1 else memoryview(b"".join(parts))
        with self._sends:
            if self._ended is not None:
                raise PeerLost(self._ended)
            try:
                if not self._unsent:
                    whole = whole[self._send_now(whole) :]
                if whole:
                    self._unsent.append(bytes(whole))
                    if self._sending is None:
                        sending = threading.Thread(target=self._send_rest, name="graphcomp sends", daemon=True)
                        sending.start()
                        self._sending = sending
            except BaseException as error:
                self._finish(error)
                raise

    def post(self, payloads: Sequence[torch.Tensor]) -> Posted:
        """Receive into dense tensors on CPU, behind what is posted already."""
        self._posted.extend(payloads)
        return Posted(self, self._taken + len(self._posted))

    def take(self, count: int) -> None:
        """Wait until so many payloads have been received in all. A signal handler that raises ends the wait."""
        with self._takes:
            end = time.monotonic() + self.deadline
            try:
                while self._taken < count:
                    part = _bytes(self._posted[0])
                    while part:
                        part = part[self._receive(part, end) :]
                    self._posted.popleft()
                    self._taken += 1
            except BaseException as error:
                self._finish(error)
                raise

    def close(self) -> None:
        """Both ends: whoever waits at one of them raises PeerLost."""
        self._shut()
        sending = self._sending
        if sending is not None:
            sending.join()
        with self._takes, self._sends:  # no other thread uses the descriptor, which may be another file's at once
            self.drop()

    def drop(self) -> None:
        """Give up this process's descriptor; the other end stays as it is while another process has one."""
        self._end()

    def _send_now(self, whole: memoryview) -> int:
        """How many bytes the kernel has room for."""
        try:
            return self._socket.send(whole, _HOW | _AT_ONCE)
        except OSError as error:
            if error.errno in _NO_ROOM:  # it has taken nothing
                return 0
            raise self._lost(error.strerror) from error

    def _send_rest(self) -> None:
        """In a thread: this rank may compute, or wait in a collective, before the peer has read what is on its way."""
        while True:
            try:
                self._socket.sendall(self._unsent[0], _HOW)
            except BaseException as error:  # a part of it may be on its way: raised by the next send or wait
                self._finish(error)
            with self._sends:
                self._unsent.popleft()
                if self._ended is not None:
                    self._unsent.clear()
                if not self._unsent:
                    self._sending = None
                    return

    def _receive(self, part: memoryview, end: float) -> int:
        """How many bytes have come. A read that waits would wait anew behind each signal, whatever its time limit."""
        asleep: float | None = None
        while True:
            try:
                count = self._socket.recv_into(part, 0, _AT_ONCE)
            except BlockingIOError:
                now = time.monotonic()
                if now >= end:
                    late = f"Timed out waiting {1000 * self.deadline:.0f}ms for a message from rank {self.peer}"
                    raise PeerLate(late) from None
                if asleep is None:
                    asleep = now + self.awake
                if now >= asleep:
                    self._arrival.poll(1000 * min(end - now, _DAY))
            except OSError as error:
                raise self._lost(error.strerror) from error
            else:
                if count:
                    return count
                raise self._lost("Connection closed by peer") if self._ended is None else PeerLost(self._ended)

    def _finish(self, error: BaseException) -> None:
        """No message goes or comes any more, for this reason."""
        if self._ended is None:
            other = isinstance(error, PeerLost | PeerLate)
            self._ended = str(error) if other else str(self._lost(str(error) or type(error).__name__))
        self._shut()

    def _shut(self) -> None:
        with contextlib.suppress(OSError):  # the other end is gone
            self._socket.shutdown(socket.SHUT_RDWR)

    def _lost(self, how: str | None) -> PeerLost:
        return PeerLost(f"{how}, rank {self.peer}")


@dataclass(slots=True)
class Posted:
    """A receive under way. count: of payloads that the channel has received when this one is complete."""

    channel: Channel
    count: int

    def wait(self) -> None:
        self.channel.take(self.count)


def _bytes(payload: torch.Tensor) -> memoryview:
    """The memory of a dense tensor, which has to be kept alive. torch lends it to Python only through NumPy."""
    return _memory(payload.data_ptr(), payload.nbytes, _WRITABLE)


_OPEN: weakref.WeakSet[Channel] = weakref.WeakSet()


def _forked() -> None:
    """A child process that a rank forks, such as a data loader's, would keep its connections open behind its end."""
    for channel in list(_OPEN):
        channel.drop()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
