"""Backends put real process groups in the place of what programs call them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from graphcomp import backend as backends
from graphcomp.errors import VerifyError
from graphcomp.ir.program import Program
from graphcomp.ir.signature import BatchLeaf, Output
from tests.collectives.fake import fake_mesh
from tests.ir.build import Builder

ops = torch.ops._c10d_functional


def reduction(group: str) -> Program:
    b = Builder()
    x = b.input(BatchLeaf("x"), b.leaf, "x")
    total = b.call(ops.wait_tensor.default, b.call(ops.all_reduce.default, x, "sum", group))
    return b.program({Output("y"): b.call(torch.ops.aten.relu.default, total)})


@pytest.mark.parametrize("name", ["eager", pytest.param("inductor", marks=pytest.mark.inductor)])
def test_a_group_that_is_not_known_is_named(name: Any) -> None:
    with pytest.raises(VerifyError, match="runs over mesh axis 'dp', which has no process group here"):
        backends.get(name).compile(reduction("dp"))


@pytest.mark.inductor
def test_code_is_shared_only_within_a_process_group() -> None:
    with fake_mesh(dp=2, tp=2) as mesh:
        backend = backends.get("inductor")
        first = {"dp": mesh.get_group("dp").group_name}
        other = {"dp": dist.new_group([0, 2]).group_name}
        made = [backend.compile(reduction("dp"), groups) for groups in (first, other, first)]
        assert [one.reused for one in made] == [False, False, True]
        for one in made:
            (found,) = one([torch.ones(6, 8)])
            assert found.shape == (6, 8)


def test_a_program_is_called_with_real_groups() -> None:
    with fake_mesh(dp=2, tp=2) as mesh:
        program = reduction("ranks(0,2)")
        compiled = backends.get("eager").compile(program, {"ranks(0,2)": mesh.get_group("dp").group_name})
        assert compiled([torch.ones(3, 4)])[0].shape == (3, 4)
