"""Small messages between two ranks of one machine, over a stream socket.

A process group hands each message to a thread, which sends it when the receiver has told where to put it: that is more
work than a small stage has. A socket takes a small message at once, and who waits for it reads it in his own thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

_HOW = getattr(socket, "MSG_NOSIGNAL", 0)
_AT_ONCE = _HOW | getattr(socket, "MSG_DONTWAIT", 0)
_ALL = getattr(socket, "MSG_WAITALL", 0)

_memory = ctypes.pythonapi.PyMemoryView_FromMemory
_memory.argtypes, _memory.restype = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int), ctypes.py_object
_WRITABLE = 0x200  # PyBUF_WRITE


class PeerLost(RuntimeError):
    """The other rank is gone, or has closed its end."""


class PeerLate(RuntimeError):
    """Nothing came from the other rank until the deadline."""


class Channel:
    """This rank's end of what it and another rank send each other: in each direction, in the order of sending.

    connection: a connected stream socket, which the channel takes over. peer: the other rank, for messages. deadline:
    seconds that a wait may take.
    """

    def __init__(self, connection: socket.socket, peer: int, deadline: float) -> None:
        self.peer, self.deadline, self._socket = peer, deadline, connection
        connection.setblocking(True)
        seconds, rest = divmod(deadline, 1)
        # By the kernel: with a timeout of Python's own, each call would ask first whether the socket is ready.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", int(seconds), int(rest * 1e6)))
        self._posted: deque[memoryview] = deque()
        self._taken = 0
        self._unsent: deque[bytes] = deque()
        self._sending: threading.Thread | None = None
        self._lock = threading.Lock()
        self._end = weakref.finalize(self, connection.close)
        _OPEN.add(self)

    def send(self, payloads: Sequence[torch.Tensor]) -> None:
        """Send dense tensors on CPU. Waits for nobody, and needs their memory no longer."""
        parts = [_bytes(one) for one in payloads]
        whole = parts[0] if len(parts) == 1 else memoryview(b"".join(parts))
        if not self._unsent:
            whole = whole[self._send_now(whole) :]
        if whole:
            with self._lock:
                self._unsent.append(bytes(whole))
                if self._sending is None:
                    self._sending = threading.Thread(target=self._send_rest, name="graphcomp sends", daemon=True)
                    self._sending.start()

    def post(self, payloads: Sequence[torch.Tensor]) -> Posted:
        """Receive into dense tensors on CPU, behind what is posted already."""
        self._posted.extend(map(_bytes, payloads))
        return Posted(self, self._taken + len(self._posted), payloads)

    def take(self, count: int) -> None:
        """Wait until so many payloads have been received in all. A signal handler that raises ends the wait."""
        while self._taken < count:
            part = self._posted[0]
            while part:
                part = part[self._receive(part) :]
            self._posted.popleft()
            self._taken += 1

    def close(self) -> None:
        """Both ends: whoever waits at one of them raises PeerLost."""
        with contextlib.suppress(OSError):  # the other end is gone
            self._socket.shutdown(socket.SHUT_RDWR)
        sending = self._sending
        if sending is not None:
            sending.join()
        self.drop()

    def drop(self) -> None:
        """Give up this process's descriptor; the other end stays as it is while another process has one."""
        self._posted.clear()
        self._end()

    def _send_now(self, whole: memoryview) -> int:
        """How many bytes the kernel has room for."""
        try:
            return self._socket.send(whole, _AT_ONCE)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise self._lost(error.strerror) from error

    def _send_rest(self) -> None:
        """In a thread: this rank may compute, or wait in a collective, before the peer has read what is on its way."""
        while True:
            try:
                self._socket.sendall(self._unsent[0], _HOW)
            except OSError:  # what is sent next will meet it again
                self._unsent.clear()
            with self._lock:
                if self._unsent:
                    self._unsent.popleft()
                if not self._unsent:
                    self._sending = None
                    return

    def _receive(self, part: memoryview) -> int:
        try:
            count = self._socket.recv_into(part, 0, _ALL)
        except BlockingIOError:
            late = f"Timed out waiting {1000 * self.deadline:.0f}ms for a message from rank {self.peer}"
            raise PeerLate(late) from None
        except OSError as error:
            raise self._lost(error.strerror) from error
        if not count:
            raise self._lost("Connection closed by peer")
        return count

    def _lost(self, how: str | None) -> PeerLost:
        return PeerLost(f"{how}, rank {self.peer}")


@dataclass(slots=True)
class Posted:
    """A receive under way. count: of payloads that the channel has received when this one is complete."""

    channel: Channel
    count: int
    payloads: Sequence[torch.Tensor]

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
