"""An embedding's gradient goes to its accumulator row by row."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphcomp import backend
from graphcomp.backend.embeddings import scatter_embeddings
from graphcomp.ir import meta
from graphcomp.ir import signature as role
from graphcomp.ir.interp import boxed_callable
from graphcomp.ir.program import Program
from graphcomp.partition import partition
from graphcomp.partition.accumulating import accumulating
from tests.backend.test_inductor import Peak
from tests.partition.running import joint_of, square_loss

ROWS = 500


class Table(nn.Module):
    """tied: the table is a projection as well, so that its gradient has another term."""

    def __init__(self, tied: bool = False, **options: Any) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, 4, **options)
        self.tied = tied

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens).sin()
        return x @ self.table.weight.t() if self.tied else x


def program_of(model: nn.Module, tokens: Tensor, dtype: torch.dtype | None = None) -> Program:
    cut = partition(joint_of(model, square_loss, (tokens,)), 1)
    fused = cut.stages[0].fused
    if fused is None:
        raise LookupError("no fused program")
    return accumulating(fused, cut, dtype)


def inputs_of(program: Program, model: Table, tokens: Tensor) -> list[Any]:
    box: list[Any] = []
    for what, node in program.input_nodes():
        form = meta.tensor(node)
        match what:
            case role.Param():
                box.append(model.table.weight.detach())
            case role.BatchLeaf():
                box.append(tokens)
            case role.Size(symbol):
                sizes = dict(zip((str(s) for s in _sizes(program)), tokens.shape, strict=True))
                box.append(sizes[symbol])
            case role.Accumulator():
                box.append(torch.full((ROWS, 4), 0.5, dtype=form.dtype if form is not None else None))
            case _:
                box.append(torch.ones((), dtype=form.dtype if form is not None else None))
    return box


def _sizes(program: Program) -> tuple[Any, ...]:
    leaf = next(node for what, node in program.input_nodes() if isinstance(what, role.BatchLeaf))
    found = meta.tensor(leaf)
    return () if found is None else tuple(found.shape)


@pytest.mark.parametrize(
    ("options", "dtype", "tokens"),
    [
        ({}, None, torch.int64),
        ({"padding_idx": 3}, None, torch.int64),
        ({"padding_idx": 0}, torch.float64, torch.int32),
        ({"tied": True}, None, torch.int64),
    ],
)
def test_the_sum_is_the_same(options: dict[str, Any], dtype: torch.dtype | None, tokens: torch.dtype) -> None:
    torch.manual_seed(0)
    model, given = Table(**options), torch.tensor([[1, 3, 3], [0, 49, 1]], dtype=tokens)
    program = program_of(model, given, dtype)
    expected = boxed_callable(program)(inputs_of(program, model, given))
    changed = program.copy()
    assert scatter_embeddings(changed.graph) == 1
    targets = {node.target for node in changed.graph.nodes}
    assert torch.ops.aten.embedding_dense_backward.default not in targets
    found = boxed_callable(changed)(inputs_of(program, model, given))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "dtype"), [({"scale_grad_by_freq": True}, None), ({}, torch.bfloat16)], ids=["scaled", "narrow sum"]
)
def test_what_is_left_as_it_is(options: dict[str, Any], dtype: torch.dtype | None) -> None:
    """Gradients that depend on how often a row is used, and sums that are rounded."""
    program = program_of(Table(**options), torch.zeros(2, 3, dtype=torch.int64), dtype)
    assert scatter_embeddings(program.copy().graph) == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_in_half_precision_are_left_to_the_compiler(dtype: torch.dtype) -> None:
    """It adds up a token's rows in single precision, and rounds once."""
    program = program_of(Table().to(dtype), torch.zeros(2, 3, dtype=torch.int64))
    assert scatter_embeddings(program.copy().graph) == 0


@pytest.mark.inductor
def test_a_frequent_token_keeps_its_gradient_in_half_precision() -> None:
    model, tokens = Table().to(torch.bfloat16), torch.zeros(8, 512, dtype=torch.int64)
    program = program_of(model, tokens)
    box = inputs_of(program, model, tokens)
    place = next(place for place, what in enumerate(program.inputs) if isinstance(what, role.Accumulator))
    total = box[place].zero_()
    backend.get("inductor").compile(program).call(box)
    weight = model.table.weight.detach()[0].double()
    expected = 2 * tokens.numel() * weight.sin() * weight.cos()
    torch.testing.assert_close(total[0].double(), expected, rtol=0.02, atol=0)


@pytest.mark.inductor
@pytest.mark.parametrize("tied", [False, True])
def test_compiled_it_needs_no_table_of_zeros(tied: bool) -> None:
    """Beside the sum itself, no matrix of the size of the table is allocated: for neither term of a tied one."""
    torch.manual_seed(0)
    model, tokens = Table(tied, padding_idx=3), torch.tensor([[1]])
    program = program_of(model, tokens)
    call = backend.get("inductor").compile(program).call
    expected = boxed_callable(program)(inputs_of(program, model, tokens))
    places = [place for place, what in enumerate(program.inputs) if isinstance(what, role.Accumulator)]
    box = inputs_of(program, model, tokens)
    total = box[places[0]]
    call(list(box))
    torch.testing.assert_close(total, expected[-1], rtol=1e-6, atol=1e-6)
    box, peak = inputs_of(program, model, tokens), Peak()
    with torch.profiler.profile(profile_memory=True) as profile:
        call(box)
    for event in profile.profiler.kineto_results.events():
        peak.see(event)
    assert 0 < peak.most < ROWS * 4 * 4
