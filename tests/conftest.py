"""One thread, fresh seeds, tiers in order of cost, and no test may leave global state behind."""

from __future__ import annotations

import gc
import os
import random
import shutil
import signal
import sysconfig
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis
import pytest
import torch
import torch.distributed as dist

TIERS = ("gloo", "inductor", "cuda")

# The same examples on every run, and no time limit on one example: the machine may be busy.
hypothesis.settings.register_profile("graphcomp", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("graphcomp")


def pytest_configure() -> None:
    torch.set_num_threads(1)


def missing_for_inductor() -> str | None:
    """What Inductor needs on CPU and this machine does not have, in words; None if all is there."""
    compilers = [os.environ.get("CXX"), "g++", "clang++"]
    if not any(name and shutil.which(name) for name in compilers):
        return "no C++ compiler (g++ or clang++) on this machine"
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        return "no Python headers (Python.h) on this machine"
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what this machine cannot run, with the reason; run the cheap tiers first.

    Where whole files are dealt to workers, long ones come first, for at the end all would wait for them: those with a
    dear tier, then those that compile steps; with the most tests before the others.
    """
    lacks = {
        "inductor": missing_for_inductor(),
        "cuda": None if torch.cuda.is_available() else "no CUDA device",
    }
    for item in items:
        for marker, reason in lacks.items():
            if reason and item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))
    items.sort(key=tier_of)  # stable: the order within a tier is pytest's own
    if hasattr(config, "workerinput"):
        dear = {item.path for item in items if tier_of(item)}
        tests = Counter(item.path for item in items if item.path not in dear)
        items.sort(key=lambda item: (item.path not in dear, not shares_captures(item.path), -tests[item.path]))


def pytest_collection_finish() -> None:
    """What was imported stays: the collector need not look through millions of objects again and again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000)


def tier_of(item: pytest.Item) -> int:
    return max((place for place, name in enumerate(TIERS, 1) if item.get_closest_marker(name)), default=0)


def global_state() -> dict[str, object]:
    """What a test may change while it runs but must put back."""
    return {
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "gradient mode": torch.is_grad_enabled(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
    }


def restore(state: dict[str, object]) -> None:
    torch.set_default_dtype(state["default dtype"])
    torch.set_default_device(state["default device"])
    torch.set_grad_enabled(state["gradient mode"])
    torch.use_deterministic_algorithms(state["deterministic algorithms"])


@pytest.fixture(autouse=True)
def fresh_and_clean() -> Iterator[None]:
    """Seed every generator before a test; fail the test that leaves a process group or a changed default."""
    random.seed(0)
    torch.manual_seed(0)
    before = global_state()
    yield
    after = global_state()
    left = [f"{name}: was {before[name]}, is {after[name]}" for name in before if before[name] != after[name]]
    if left:
        restore(before)
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
        left.append("a process group is still initialised")
    if left:
        pytest.fail("the test leaves global state behind: " + "; ".join(left), pytrace=False)


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt, also where the tests run as a background job of a script, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


HERE = Path(__file__).parent
SHARING = {
    *("cases", "checkpoint", "dataparallel", "inspect", "partition", "runtime", "steps", "testing", "trainer"),
    *("test_clip.py", "test_huggingface.py"),
}
"""Tests of what is done with a program: equal models are captured once for all of them."""


def shares_captures(path: Path) -> bool:
    return path.is_relative_to(HERE) and path.relative_to(HERE).parts[0] in SHARING


@pytest.fixture(autouse=True)
def equal_models_share_a_capture(request: pytest.FixtureRequest) -> Iterator[None]:
    if not shares_captures(request.path) or request.node.get_closest_marker("inductor"):
        yield
        return
    from tests.sharing import shared_captures

    with shared_captures():
        yield
