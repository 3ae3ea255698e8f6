"""Rank programs on virtual ranks against the plain loop."""

from __future__ import annotations

import pytest
import torch

from tests.runtime.chain import WIDTH, chain, plain_loop, run


def batches(*rows: int) -> list[torch.Tensor]:
    return [torch.randn(count, WIDTH) for count in rows]


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("microbatches", [0, 1, 2, 3, 5])
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_every_schedule_equals_the_plain_loop(stages: int, name: str, microbatches: int, fused: bool) -> None:
    made, given = chain(stages), batches(*(2 + number for number in range(microbatches)))
    outcome, plain = run(made, name, given, fused), plain_loop(made, given)
    assert torch.equal(
        torch.stack([*outcome.losses, torch.zeros(())]), torch.stack([*plain.losses, torch.zeros(())])
    )
    assert outcome.gradients.keys() == plain.gradients.keys()
    for parameter, grad in plain.gradients.items():
        torch.testing.assert_close(outcome.gradients[parameter], grad, rtol=1e-6, atol=1e-7)
