"""What data ranks report and reduce together."""

from __future__ import annotations

from dataclasses import replace

import pytest

from graphcomp.capture.joint import LossSpec, MetricSpec
from graphcomp.dataparallel.contribution import Contribution, combine, contribution
from graphcomp.errors import AgreementError


def of(*losses: LossSpec, metrics: tuple[MetricSpec, ...] = (), gradients: tuple[str, ...] = ()) -> Contribution:
    return replace(contribution([]), losses=losses, metrics=metrics, gradients=gradients)


def test_what_any_rank_has_all_have_in_one_order() -> None:
    first, second = LossSpec("lm", "token"), LossSpec("balance", "mean")
    found = combine([of(first, gradients=("a",)), of(second, first, gradients=("b", "a"))])
    assert (found.losses, found.gradients) == ((first, second), ("a", "b"))


def test_one_name_has_one_meaning() -> None:
    with pytest.raises(AgreementError, match="loss 'lm' is not the same to all microbatches") as caught:
        combine([of(LossSpec("lm", "token")), of(LossSpec("lm", "mean"))])
    assert "give it another name where it is something else" in str(caught.value)
    metrics = [(MetricSpec("z", kind),) for kind in ("sum", "max")]
    with pytest.raises(AgreementError, match="metric 'z' is not the same"):
        combine([of(metrics=one) for one in metrics])
