"""A range is opened only while a profiler records."""

from __future__ import annotations

import torch

from graphcomp.compat.profiler import is_recording, span


def test_a_profiler_is_noticed() -> None:
    assert not is_recording()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        assert is_recording()
        with span("a range"):
            torch.ones(2).sum()
    assert not is_recording()
    assert [event.count for event in profile.key_averages() if event.key == "a range"] == [1]


def test_without_one_nothing_is_made() -> None:
    assert span("one") is span("two")
