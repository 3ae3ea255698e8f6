"""Calls without a meaning are refused by name, before anything is sent; spellings map to one reduction each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import graphcomp
from graphcomp import collectives as gc
from graphcomp.collectives.reductions import SPELLINGS, reduction
from graphcomp.compat.dispatch import Watch
from graphcomp.errors import CollectiveError, GraphcompError
from tests.collectives.fake import fake_mesh

X = torch.ones(4, 6)
NUMBERS = torch.tensor([2, 2])
Call = Callable[[DeviceMesh], Any]
WRONG: list[tuple[str, Call]] = [
    ("there is no such reduction", lambda m: gc.all_reduce(X, m["dp"], "SUM")),
    ("there is no such reduction", lambda m: gc.all_reduce(X, m["dp"], "average")),
    ("there is no such reduction", lambda m: gc.all_reduce(X, m["dp"], dist.ReduceOp.BXOR)),
    ("there is no such reduction", lambda m: gc.all_reduce(X, m["dp"], ["sum"])),
    ("there is no such reduction", lambda m: gc.reduce_scatter(X, m["dp"], op=None)),
    ("an average of integers is no integer", lambda m: gc.all_reduce(X.long(), m["dp"], "mean")),
    ("one axis of a mesh", lambda m: gc.all_reduce(X, m)),
    ("needs the group of ranks", lambda m: gc.all_reduce(X, "dp")),
    ("needs the group of ranks", lambda m: gc.all_reduce(X, None)),
    ("needs the group of ranks", lambda m: gc.all_reduce(X, dist.new_group([1, 2]))),
    ("takes a strided tensor", lambda m: gc.all_reduce(3.0, m["dp"])),  # type: ignore[arg-type]
    ("takes a strided tensor", lambda m: gc.all_reduce(X.to_sparse(), m["dp"])),
    ("there is no such dimension", lambda m: gc.all_gather(X, m["dp"], 2)),
    ("there is no such dimension", lambda m: gc.all_gather(X, m["dp"], -3)),
    ("there is no such dimension", lambda m: gc.reduce_scatter(X, m["dp"], 1.0)),  # type: ignore[arg-type]
    ("there is no such dimension", lambda m: gc.reduce_scatter(X, m["dp"], True)),
    ("a dimension does not divide among the ranks", lambda m: gc.reduce_scatter(X[:3], m["dp"])),
    ("takes a tensor that has some", lambda m: gc.reduce_scatter(X.sum(), m["dp"])),
    ("takes a tensor that has some", lambda m: gc.all_to_all(X.sum(), m["dp"])),
    ("each at most once", lambda m: gc.all_gather(X, m["dp"], ranks=[0, 0])),
    ("each at most once", lambda m: gc.all_gather(X, m["dp"], ranks=[])),
    ("'ranks' is a whole number", lambda m: gc.all_gather(X, m["dp"], ranks=[2])),
    ("'ranks' is a whole number", lambda m: gc.all_gather(X, m["dp"], ranks=[-1])),
    ("'src' is a whole number", lambda m: gc.broadcast(X, m["dp"], 2)),
    ("'src' is a whole number", lambda m: gc.broadcast(X, m["dp"], True)),
    ("the rows do not divide among the ranks", lambda m: gc.all_to_all(X[:3], m["dp"])),
    ("input_splits is missing", lambda m: gc.all_to_all(X, m["dp"], output_splits=[2, 2])),
    ("input_splits is missing", lambda m: gc.all_to_all(X, m["dp"], capacity=2)),
    ("input_splits do not add up", lambda m: gc.all_to_all(X, m["dp"], [2, 2], [1, 2])),
    ("'input_splits' holds one number", lambda m: gc.all_to_all(X, m["dp"], [2, 2], [4])),
    ("'input_splits' holds one number", lambda m: gc.all_to_all(X, m["dp"], [2, 2], 4)),  # type: ignore[arg-type]
    ("'input_splits' is a whole number", lambda m: gc.all_to_all(X, m["dp"], [2, 2], [-1, 5])),
    ("'output_splits' is a whole number", lambda m: gc.all_to_all(X, m["dp"], [-2, 2], [2, 2])),
    ("'output_splits' is a whole number", lambda m: gc.all_to_all(X, m["dp"], [9, -1], NUMBERS, capacity=2)),
    ("'input_splits' holds one whole number", lambda m: gc.all_to_all(X, m["dp"], input_splits=NUMBERS.float())),
    ("'input_splits' holds one whole number", lambda m: gc.all_to_all(X, m["dp"], input_splits=NUMBERS[:1])),
    ("a split is negative", lambda m: gc.all_to_all(X, m["dp"], -NUMBERS, NUMBERS)),
    ("'capacity' is a whole number", lambda m: gc.all_to_all(X, m["dp"], input_splits=NUMBERS, capacity=0)),
    ("more rows than the declared maximum", lambda m: gc.all_gather_uneven(X, m["dp"], NUMBERS, 3)),
    ("'maximum' is a whole number", lambda m: gc.all_gather_uneven(X, m["dp"], NUMBERS, 0)),
    ("'counts' is a whole number", lambda m: gc.all_gather_uneven(X, m["dp"], [5, 0], 4)),
    ("'counts' holds one whole number", lambda m: gc.all_gather_uneven(X, m["dp"], torch.ones(2) > 0, 4)),
]


def test_wrong_calls_are_refused_before_communication() -> None:
    with fake_mesh(dp=2, tp=2) as mesh:
        for says, call in WRONG:
            sent: list[str] = []
            watch = Watch(lambda op, result, sent=sent: sent.append(op.namespace))  # type: ignore[misc]
            with pytest.raises(CollectiveError, match=says) as caught, watch:
                call(mesh)
            assert "collectives." in str(caught.value.where), says
            assert not any("c10d" in namespace for namespace in sent), says


def test_the_message_says_all_there_is_to_say() -> None:
    with fake_mesh(dp=2) as mesh, pytest.raises(GraphcompError) as caught:
        gc.reduce_scatter(X[:3], mesh)
    assert str(caught.value).splitlines()[:5] == [
        "a dimension does not divide among the ranks",
        "  where: collectives.reduce_scatter, dim=0",
        "  expected: a multiple of 2",
        "  got: 3",
        "  what to do: pad the dimension to a multiple of the number of ranks",
    ]


def test_the_table_of_reductions_is_closed() -> None:
    assert {op: reduction(op, X, "all_reduce") for op in SPELLINGS} == dict(SPELLINGS)
    assert sorted(set(SPELLINGS.values())) == ["avg", "max", "min", "product", "sum"]
    assert sorted(name for name in SPELLINGS if isinstance(name, str)) == sorted(
        ["sum", "avg", "mean", "max", "min", "product", "prod"]
    )


@pytest.mark.parametrize("op", ["max", "min", "product"])
@pytest.mark.parametrize("run", [gc.all_reduce, gc.reduce_scatter])
def test_no_gradient_is_made_up(op: str, run: Callable[..., Tensor]) -> None:
    """Where none is needed, the value may be used all the same."""
    with fake_mesh(dp=2) as mesh:
        x = X.clone().requires_grad_()
        total = run(x, mesh, op=op)
        run(x.detach(), mesh, op=op)
        with pytest.raises(CollectiveError, match=f"op='{op}' has no gradient") as caught:
            total.sum().backward()
    assert "test_errors.py" in str(caught.value.where)
    assert x.grad is None


def test_public_names() -> None:
    assert graphcomp.collectives is gc
    assert all(hasattr(gc, name) for name in gc.__all__)
