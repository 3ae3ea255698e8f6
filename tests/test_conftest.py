"""The guard of conftest.py can fail, seeds are fresh, the tiers run in order of cost, and skips say why."""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent
INI = "[pytest]\nmarkers =\n  gloo\n  inductor\n  cuda\n"

SUITE = """
import random
import pytest, torch
import torch.distributed as dist

drawn = set()

@pytest.mark.inductor
def test_compiled():
    raise RuntimeError("must not run: there is no compiler")

@pytest.mark.gloo
def test_processes():
    pass

@pytest.mark.parametrize("time", [1, 2])
def test_seed(time):
    drawn.add((random.random(), float(torch.rand(()))))
    assert len(drawn) == 1

def test_leaks_dtype():
    torch.set_default_dtype(torch.float64)

def test_leaks_gradient_mode():
    torch.set_grad_enabled(False)

def test_leaks_determinism():
    torch.use_deterministic_algorithms(True)

def test_leaks_process_group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

def test_after_the_leaks_all_is_as_it_was():
    assert torch.get_default_dtype() == torch.float32
    assert torch.is_grad_enabled() and not torch.are_deterministic_algorithms_enabled()
    assert not dist.is_initialized()
"""


@pytest.fixture
def outcome(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.RunResult:
    """The suite above, without a compiler, in a process of its own: torch cannot be imported twice in one."""
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    pytester.makeconftest((HERE / "conftest.py").read_text())
    pytester.makeini(INI)
    pytester.makepyfile(SUITE)
    return pytester.runpytest_subprocess("-v", "-rsE", "-p", "no:cacheprovider")


def test_the_guards_of_conftest(outcome: pytest.RunResult) -> None:
    outcome.assert_outcomes(passed=8, errors=4, skipped=1)
    for what in (
        "default dtype: was",
        "gradient mode: was",
        "deterministic algorithms: was",
        "a process group",
    ):
        outcome.stdout.fnmatch_lines([f"*leaves global state behind: {what}*"])
    outcome.stdout.fnmatch_lines(["*::test_seed*", "*::test_processes*", "*::test_compiled*"])
    outcome.stdout.fnmatch_lines(["SKIPPED*no C++ compiler*"])
