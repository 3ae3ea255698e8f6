"""Ranks that share a machine connect with each other, over sockets in a folder that is gone afterwards."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import struct
import tempfile
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_BOOT = Path("/proc/sys/kernel/random/boot_id")

_HELLO = struct.Struct("16sqq")
"""What comes first on a connection: the token of the rank that is called, who calls, and which of theirs this is."""

_LONGEST = 10.0
"""Seconds to wait for what the other side has already done."""

Exchange = Callable[[Any], Sequence[Any]]
"""What every rank gives, in order of ranks. All ranks call it together."""

Connections = MutableMapping[tuple[int, int], socket.socket]
"""By rank, and number among those with it."""


def connect(rank: int, peers: Sequence[int], number: int, exchange: Exchange) -> Mapping[int, list[socket.socket]]:
    """So many stream sockets to each of these peers that can be reached, in one order at both ends.

    All ranks call it together, with the same number; whoever names a peer is named by it. A peer is left out, at both
    ends, if it is on another machine, sees other files, or has no descriptor to spare.
    """
    made: Connections = {}
    try:
        with _listening(len(peers) * number) as listener:
            offers = exchange(None if listener is None else listener.offer)
            for peer in peers:
                if peer < rank and _reaches(offers[rank], offers[peer]):
                    for which in range(number):
                        _call(offers[peer], rank, made, peer, which)
            called = exchange(set(made))
            if listener is not None:
                listener.answer(sum((rank, which) in called[peer] for peer in peers for which in range(number)), made)
            complete = exchange(set(made))
        agreed = [
            peer
            for peer in peers
            if all((peer, which) in made and (rank, which) in complete[peer] for which in range(number))
        ]
        return {peer: [made.pop((peer, which)) for which in range(number)] for peer in agreed}
    finally:
        for left in made.values():
            left.close()


@dataclass(frozen=True)
class _Offer:
    """Where a rank can be called, and what it wants to hear then."""

    machine: str
    path: str
    token: bytes


def _reaches(one: _Offer | None, other: _Offer | None) -> bool:
    return one is not None and other is not None and one.machine == other.machine


@dataclass(frozen=True)
class _Listener:
    socket: socket.socket
    offer: _Offer

    def answer(self, count: int, made: Connections) -> None:
        """Take so many calls, which have been made."""
        for _ in range(count):
            with contextlib.suppress(OSError, struct.error), contextlib.ExitStack() as undone:
                connection = undone.enter_context(self.socket.accept()[0])
                connection.settimeout(_LONGEST)
                token, peer, which = _HELLO.unpack(connection.recv(_HELLO.size, socket.MSG_WAITALL))
                if token == self.offer.token:
                    made[peer, which] = connection
                    undone.pop_all()


@contextlib.contextmanager
def _listening(calls: int) -> Iterator[_Listener | None]:
    """None where that is not possible, as on a system without such sockets, or in a folder with too long a name."""
    with contextlib.ExitStack() as stack:
        listener: _Listener | None = None
        with contextlib.suppress(OSError, AttributeError):
            folder = Path(tempfile.mkdtemp(prefix="graphcomp-"))  # of this user alone
            path = str(folder / "ranks")
            stack.callback(_remove, folder, path)
            own = stack.enter_context(socket.socket(socket.AF_UNIX))
            own.settimeout(_LONGEST)
            own.bind(path)
            own.listen(calls)
            listener = _Listener(own, _Offer(_machine(), path, secrets.token_bytes(16)))
        yield listener


def _remove(folder: Path, path: str) -> None:
    """By name: to look into a folder takes a descriptor, and there may be none left."""
    for remove, what in ((os.unlink, path), (os.rmdir, folder)):
        with contextlib.suppress(OSError):
            remove(what)


def _call(offer: _Offer, rank: int, made: Connections, peer: int, which: int) -> None:
    with contextlib.suppress(OSError), contextlib.ExitStack() as undone:
        connection = undone.enter_context(socket.socket(socket.AF_UNIX))
        connection.settimeout(_LONGEST)
        connection.connect(offer.path)
        connection.sendall(_HELLO.pack(offer.token, rank, which))
        made[peer, which] = connection
        undone.pop_all()


def _machine() -> str:
    """Equal for two processes that may see the same files: the name of the host, and of its running system."""
    boot = _BOOT.read_text().strip() if _BOOT.exists() else ""
    return f"{socket.gethostname()} {boot}"
