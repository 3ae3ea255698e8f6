"""Captures of zoo models, real inputs for them, and comparison of what two programs make of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from graphcomp.capture.batch import describe
from graphcomp.capture.joint import Joint
from graphcomp.ir import interp, meta
from graphcomp.ir import signature as role
from graphcomp.ir.program import Program
from tests.sharing import captures
from tests.zoo.case import Case

SEED = 11
DENOMINATOR = 7


def sample(case: Case, dtype: torch.dtype = torch.float32) -> tuple[Joint, list[dict[role.Role, Any]]]:
    """The capture of a case's first microbatch, as traced, and inputs from two microbatches."""
    model = case.build().to(dtype)
    batches = case.microbatches(4, dtype=dtype)
    joint = captures(model, case.loss_fn, batches[0])
    joint = replace(joint, program=joint.program.copy())  # a pass may work in place
    return joint, [inputs(joint, model, batch) for batch in batches[:2]]


def inputs(joint: Joint, model: nn.Module, batch: Any) -> dict[role.Role, Any]:
    """Values for every input of a joint program, by role; buffers are copies."""
    _, leaves = describe(batch)
    sizes = joint.sizes.fit(leaves)
    assert sizes is not None, joint.sizes.differences(joint.sizes.bind(leaves), leaves)
    found: dict[role.Role, Any] = {role.Size(symbol): size for symbol, size in sizes.items()}
    found |= {role.BatchLeaf(path): leaf for path, leaf in leaves.items()}
    found |= {role.Param(name): p.detach() for name, p in model.named_parameters()}
    found |= {role.Buffer(name): buffer.clone() for name, buffer in model.named_buffers()}
    for what, node in joint.program.input_nodes():
        value = meta.tensor(node)
        if isinstance(what, role.Denominator | role.LossScale) and value is not None:
            found[what] = torch.full((), DENOMINATOR if isinstance(what, role.Denominator) else 1, dtype=value.dtype)
    return found


def results(program: Program, given: dict[role.Role, Any]) -> dict[role.Role, Any]:
    """What a program computes, from one fixed state of the random stream."""
    wanted = {what: given[what] for what in program.inputs if not isinstance(what, role.Constant)}
    torch.manual_seed(SEED)
    return interp.run(program, wanted)


def assert_same(program: Program, other: Program, given: dict[role.Role, Any], rtol: float = 0.0) -> None:
    """Both programs compute the same: bitwise, or (rtol > 0) relative to the largest element of an output."""
    first, second = results(program, given), results(other, given)
    assert list(first) == list(second)
    for what, one in first.items():
        two = second[what]
        assert (one is None) == (two is None), what
        if one is None:
            continue
        assert (one.dtype, one.shape) == (two.dtype, two.shape), what
        if rtol:
            scale = one.abs().max().item() if one.numel() else 0.0
            torch.testing.assert_close(one, two, rtol=0, atol=rtol * max(scale, 1.0), msg=lambda m, w=what: f"{w}: {m}")
        else:
            assert torch.equal(one, two), what
