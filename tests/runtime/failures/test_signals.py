"""Signals are held back while something runs that must be done as a whole."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from graphcomp.runtime.failures.signals import signals_held


@pytest.fixture(autouse=True)
def handlers_stay(ctrl_c: None) -> Iterator[None]:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)]
    yield
    assert before == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)]


def test_an_interrupt_comes_behind_the_block() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), signals_held():
        os.kill(os.getpid(), signal.SIGINT)
        done += [sum(range(1000)) for _ in range(10)]
    assert len(done) == 10


def test_also_if_the_block_raises() -> None:
    with pytest.raises(KeyboardInterrupt) as caught, signals_held():
        os.kill(os.getpid(), signal.SIGINT)
        raise ValueError("first")
    assert isinstance(caught.value.__context__, ValueError)


def test_handlers_of_others_are_called_with_what_they_expect() -> None:
    came: list[object] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: came.append((number, frame is not None)))
    try:
        with signals_held():
            os.kill(os.getpid(), signal.SIGUSR1)
            assert came == []
        assert came == [(signal.SIGUSR1, True)]
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_in_another_thread_there_is_nothing_to_hold() -> None:
    handlers = []

    def work() -> None:
        with signals_held():
            handlers.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert handlers == [signal.getsignal(signal.SIGINT)]
