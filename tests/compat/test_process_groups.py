"""A group's ranks are found by the name that graphs hold."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from graphcomp.compat.process_groups import ranks_of
from tests.collectives.fake import fake_mesh


def test_ranks_by_name() -> None:
    with fake_mesh(rank=3, dp=2, tp=2) as mesh:
        group = dist.new_group([1, 3])
        assert ranks_of(group.group_name) == (1, 3)
        assert ranks_of(mesh.get_group("tp").group_name) == (2, 3)
        with pytest.raises(RuntimeError, match="nobody"):
            ranks_of("nobody")
