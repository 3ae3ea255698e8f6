"""Ranks that connect with each other: each in a thread, and what they exchange in a list."""

from __future__ import annotations

import gc
import os
import resource
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from graphcomp.runtime.ranks import meeting
from graphcomp.runtime.ranks.meeting import connect
from tests.runtime.program.test_channel import descriptors

Met = list[Mapping[int, list[Any]]]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where they meet. Nothing is left there, and no descriptor that nobody has."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(meeting, "_LONGEST", 2.0)
    gc.collect()
    before = descriptors()
    yield tmp_path
    assert not list(tmp_path.iterdir())
    assert descriptors() == before


def meet(peers: Sequence[Sequence[int]], number: int = 1, change: Callable[[int, Any], Any] = lambda _, x: x) -> Met:
    """What each rank has. change: what a rank says, by its number."""
    ranks = len(peers)
    said: list[list[Any]] = [[] for _ in range(ranks)]
    barrier = threading.Barrier(ranks)

    def run(rank: int) -> Mapping[int, list[Any]]:
        def exchange(given: Any) -> list[Any]:
            said[rank].append(change(rank, given))
            barrier.wait(20)
            found = [each[-1] for each in said]
            barrier.wait(20)
            return found

        return connect(rank, peers[rank], number, exchange)

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(run, range(ranks)))


def close(met: Met) -> list[list[int]]:
    """Whom each rank has reached."""
    for each in met:
        for ends in each.values():
            for end in ends:
                end.close()
    return [list(each) for each in met]


RING = [(1, 3), (0, 2), (1, 3), (0, 2)]


@pytest.mark.parametrize("number", [1, 2])
def test_a_ring(number: int) -> None:
    met = meet(RING, number)
    for rank, peers in enumerate(RING):
        for peer in peers:
            for which in range(number):
                met[rank][peer][which].sendall(bytes([rank, peer, which]))
    for rank, peers in enumerate(RING):
        for peer in peers:
            for which in range(number):
                assert met[rank][peer][which].recv(10) == bytes([peer, rank, which])
    assert close(met) == [list(peers) for peers in RING]


def test_ranks_with_nobody_beside_them() -> None:
    assert close(meet([(), (), ()])) == [[], [], []]


def test_another_machine() -> None:
    def elsewhere(rank: int, said: Any) -> Any:
        return replace(said, machine="another") if rank == 2 and isinstance(said, meeting._Offer) else said

    assert close(meet([(1,), (0, 2), (1,)], 2, elsewhere)) == [[1], [0], []]


@pytest.mark.parametrize("what", ["path", "token", "nothing"])
def test_a_rank_that_cannot_be_reached(what: str, folder: Path) -> None:
    """It sees other files, is not the one that is meant, or has no sockets: left out on both sides."""

    def changed(rank: int, said: Any) -> Any:
        if rank != 0 or not isinstance(said, meeting._Offer):
            return said
        return {"path": replace(said, path=f"{folder}/none"), "token": replace(said, token=bytes(16))}.get(what)

    assert close(meet([(1,), (0, 2), (1,)], 2, changed)) == [[], [2], [1]]


def test_a_folder_with_too_long_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("x" * 120)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    assert close(meet(RING)) == [[], [], [], []]
    long.rmdir()


@pytest.mark.parametrize("spare", range(7))
def test_ranks_with_few_descriptors_left(spare: int) -> None:
    """Two ranks in one process, which share them: whatever they run out of, both leave each other out, or neither."""
    limits, last = resource.getrlimit(resource.RLIMIT_NOFILE), max(map(int, os.listdir("/proc/self/fd")))
    held = [os.open(os.devnull, os.O_RDONLY)]
    while held[-1] <= last:  # no number is free below it then
        held.append(os.open(os.devnull, os.O_RDONLY))
    os.close(end := held.pop())
    resource.setrlimit(resource.RLIMIT_NOFILE, (end + spare, limits[1]))
    try:
        met = meet([(1,), (0,)])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for one in held:
            os.close(one)
    assert close(met) in ([[], []], [[1], [0]])


def test_nobody_else_may_look_in(folder: Path) -> None:
    modes: list[int] = []

    def looked(rank: int, said: Any) -> Any:
        modes.extend(one.stat().st_mode & 0o777 for one in folder.iterdir())
        return said

    close(meet([(1,), (0,)], 1, looked))
    assert modes and set(modes) == {0o700}


def test_a_rank_that_is_interrupted_leaves_nothing_behind() -> None:
    def exchange(given: Any) -> list[Any]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        connect(0, (1,), 1, exchange)
