"""The operators that read, on real tensors."""

from __future__ import annotations

import pytest
import torch

from graphcomp.compat.reads import EXCHANGE_SPLITS, host_syncs
from graphcomp.errors import CollectiveError
from graphcomp.testing import HostSyncs


def test_real_splits_are_read_once() -> None:
    before = host_syncs()
    with HostSyncs() as seen:
        assert EXCHANGE_SPLITS(torch.tensor([2, 4]), torch.tensor([0, 5]), 6) == [5, 2, 4, 0, 5]
    assert host_syncs() - before == sum(seen.found.values()) == 1


@pytest.mark.parametrize(
    ("sent", "received", "what"),
    [([2, 3], [0, 5], "do not add up"), ([7, -1], [0, 5], "negative"), ([2, 4], [-1, 5], "negative")],
)
def test_splits_that_cannot_be(sent: list[int], received: list[int], what: str) -> None:
    with pytest.raises(CollectiveError, match=what):
        EXCHANGE_SPLITS(torch.tensor(sent), torch.tensor(received), 6)
