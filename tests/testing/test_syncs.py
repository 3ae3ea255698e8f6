"""What makes the host wait is counted, and a steady step does none of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import graphcomp as gc
from graphcomp.testing import HostSyncs
from tests.zoo import ZOO


def reads(x: torch.Tensor) -> float:
    return x.sum().item()


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda x: reads(x), "aten::_local_scalar_dense"),
        (lambda x: bool(x[0] > 0), "aten::_local_scalar_dense"),
        (lambda x: float(x[0]), "aten::_local_scalar_dense"),
        (lambda x: x.nonzero(), "aten::nonzero"),
        (lambda x: x[x > 0], "aten::index"),
        (lambda x: x.index_put((x > 0,), x.new_zeros(())), "aten::index_put"),
        (lambda x: torch.equal(x, x), "aten::equal"),
        (lambda x: torch.unique(x), "aten::_unique2"),
    ],
)
def test_each_kind_is_seen_and_named_with_its_line(call: Any, name: str) -> None:
    with HostSyncs() as syncs:
        call(torch.ones(3))
    assert any(what.startswith(f"{name} at {__file__}:") for what in syncs.found), syncs
    with HostSyncs() as syncs:
        torch.ones(3).sum().add_(1).clone()
        torch.ones(3)[torch.tensor([0, 2])]
    assert not syncs.found
    assert str(syncs) == "no host synchronisation"


def test_synchronize_is_seen_and_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    before = torch.cuda.synchronize
    with HostSyncs() as syncs:
        torch.cuda.synchronize()
    assert [what.partition(" at ")[0] for what in syncs.found] == ["torch.cuda.synchronize"]
    assert torch.cuda.synchronize is before


@pytest.mark.parametrize("name", ["gpt", "ragged_gpt", "moe", "dropout", "two_losses"])
def test_a_steady_step_with_clipping_and_optimizer_waits_for_nothing(name: str) -> None:
    case = ZOO[name]
    model = case.build()
    step = gc.compile_train_step(model, case.loss_fn, plan=gc.Plan(backend="eager", quiet=True))
    # AdamW counts its steps in a tensor; read on the host unless it is told that this may be captured.
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    for number in range(3):
        with HostSyncs() as syncs:
            result = step(case.microbatches(3, number))
            norm = gc.clip_grad_norm_(step, 1.0)
        assert number == 0 or not syncs.found, syncs
        optimizer.step()
        optimizer.zero_grad()
    assert float(result.loss) > 0
    assert float(norm) > 0
