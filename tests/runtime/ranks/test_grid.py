"""Who stands where in a mesh: axes in any order, axes that are missing or of size 1."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from graphcomp.errors import PlanError
from graphcomp.plan import Plan
from graphcomp.runtime.ranks.grid import Grid
from graphcomp.runtime.ranks.layout import check_layout
from tests.collectives.fake import fake_mesh


@contextmanager
def grid(**axes: int) -> Iterator[Grid]:
    with fake_mesh(**axes) as mesh:
        yield Grid.of(mesh)


def test_every_axis() -> None:
    with grid(pp=2, dp=2, cp=2, tp=2) as found:
        assert (found.data_axes, found.data_axis) == ((("dp", 2), ("cp", 2)), "dp_cp")
        assert found.shared_axes == ("dp", "cp", "dp_cp", "tp")
        assert found.everyone == (tuple(sorted(found.everyone[0], key=found.everyone[0].index)),)
        assert sorted(found.everyone[0]) == list(range(16))
        assert found.pipelines[:3] == ((0, 8), (1, 9), (2, 10))
        assert found.lines == ((0, 8, 1, 9), (2, 10, 3, 11), (4, 12, 5, 13), (6, 14, 7, 15))
        assert found.along("pp") == found.pipelines
        assert found.along("tp")[:3] == ((0, 1), (8, 9), (2, 3))
        assert found.along("cp")[:2] == ((0, 2), (8, 10))
        assert found.along("dp")[:2] == ((0, 4), (8, 12))
        assert found.along("dp_cp") == ((0, 2, 4, 6), (8, 10, 12, 14), (1, 3, 5, 7), (9, 11, 13, 15))
        assert found.data_ranks_along("cp") == ((0, 1), (2, 3))
        assert found.data_ranks_along("dp") == ((0, 2), (1, 3))
        assert found.position(11) == (1, 1, 1)


def test_data_ranks_count_as_the_mesh_does() -> None:
    """So that the ranks along both axes are in ascending order."""
    with grid(cp=2, pp=2, dp=2) as found:
        assert found.data_axis == "dp_cp"
        assert found.lines == ((0, 2), (1, 3), (4, 6), (5, 7))
        assert found.along("dp_cp") == ((0, 1, 4, 5), (2, 3, 6, 7))
        assert found.data_ranks_along("cp") == ((0, 2), (1, 3))


@pytest.mark.parametrize(
    ("axes", "name", "shared"),
    [
        ({"cp": 2}, "cp", ("cp",)),
        ({"dp": 1, "cp": 2}, "cp", ("cp",)),
        ({"pp": 2}, "dp", ()),
        ({"tp": 2, "dp": 3}, "dp", ("dp", "tp")),
    ],
)
def test_what_the_data_axis_is_called(axes: dict[str, int], name: str, shared: tuple[str, ...]) -> None:
    with grid(**axes) as found:
        assert (found.data_axis, found.shared_axes) == (name, shared)
        assert found.data_ranks_along("pp") == ()


def test_ranks_along_an_axis_ascend() -> None:
    from torch.distributed.device_mesh import DeviceMesh

    with fake_mesh(dp=4):
        mesh = DeviceMesh("cpu", [[0, 1], [3, 2]], mesh_dim_names=("dp", "cp"))
        with pytest.raises(PlanError, match="not in ascending order"):
            check_layout(Plan(mesh=mesh))
