"""Names the first graph node whose value differs from what eager PyTorch computes at that place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import SequenceMatcher
from typing import Any

import torch
from torch import nn

from graphcomp.capture import Joint
from graphcomp.capture.batch import describe
from graphcomp.compat.closures import functions_differentiated
from graphcomp.compat.dispatch import Watch
from graphcomp.ir import meta
from graphcomp.ir import signature as role
from graphcomp.ir.interp import trace_values
from graphcomp.testing.reference import counts_of, eager_losses, total_of, untouched


def first_node_that_differs(
    model: nn.Module, loss_fn: Callable[[Any, Any], Any] | None, batch: Any, joint: Joint, limit: float
) -> str:
    """Run one microbatch operation by operation, eager and by the joint program; the first difference in words.

    Operations are matched by name, in order. limit: largest relative difference that counts as equal.
    """
    with untouched(model):
        eager, counts = _eager(model, loss_fn, batch)
    with untouched(model), torch.no_grad():  # from the same buffers and random numbers
        _, leaves = describe(batch)
        sizes = joint.with_contents(joint.sizes.bind(leaves), leaves)
        inputs = program_inputs(model, joint, leaves, sizes, counts)
        found = [(node, value) for node, value in trace_values(joint.program, inputs) if _is_call(node)]
    matcher = SequenceMatcher(
        None, [name for name, _ in eager], [str(node.target) for node, _ in found], autojunk=False
    )
    for block in matcher.get_matching_blocks():
        for offset in range(block.size):
            node, value = found[block.b + offset]
            expected = eager[block.a + offset][1]
            if not _close(expected, value, limit):
                at = meta.note(node)
                return f"node {node.name} ({node.target}), module '{at.module}', {at.source or at.phase}"
    return "no node of the joint program differs: the difference arises behind the capture"


def program_inputs(
    model: nn.Module,
    joint: Joint,
    leaves: Mapping[str, torch.Tensor],
    sizes: Mapping[str, int],
    counts: Mapping[str, float],
    seed: torch.Tensor | None = None,
) -> dict[role.Role, Any]:
    """Every input of a joint program: the live model, a microbatch's tensors and sizes, and what losses divide by."""
    state: dict[role.Role, Any] = {role.Param(name): value.detach() for name, value in model.named_parameters()}
    state |= {role.Buffer(name): value for name, value in model.named_buffers()}
    found: dict[role.Role, Any] = {}
    for what, node in joint.program.input_nodes():
        like = meta.tensor(node)
        match what:
            case role.BatchLeaf(path):
                found[what] = leaves[path]
            case role.Size(symbol):
                found[what] = sizes[symbol]
            case role.Constant(name):
                found[what] = joint.program.constants[name]
            case role.Captured(name):
                found[what] = joint.captured[name].read()
            case role.Seed() if seed is not None:
                found[what] = seed
            case role.Denominator() | role.LossScale() if like is not None:
                number = counts[what.loss] if isinstance(what, role.Denominator) else 1
                found[what] = torch.full((), number, dtype=like.dtype, device=like.device)
            case _:
                found[what] = state[what]
    return found


def _eager(model: nn.Module, loss_fn: Any, batch: Any) -> tuple[list[tuple[str, Any]], dict[str, float]]:
    seen: list[tuple[str, Any]] = []

    def observe(operator: Any, result: Any) -> None:
        kept = result.detach().clone() if isinstance(result, torch.Tensor) else result
        seen.append((str(operator), kept))

    counts = counts_of(model, loss_fn, [batch])
    with torch.enable_grad(), functions_differentiated(), Watch(observe):
        losses, _ = eager_losses(model, loss_fn, batch)
        shares = [total_of(loss) / counts[name] for name, loss in losses.items()]
        torch.stack(shares).sum().backward() if len(shares) > 1 else shares[0].backward()
    return seen, counts


def _is_call(node: Any) -> bool:
    return node.op == "call_function" and isinstance(meta.value(node), torch.Tensor)


def _close(expected: Any, found: Any, limit: float) -> bool:
    if not isinstance(expected, torch.Tensor) or not isinstance(found, torch.Tensor):
        return True
    if expected.shape != found.shape or expected.dtype != found.dtype:
        return True  # matched by name only; a differing shape means another operation
    if not expected.is_floating_point():
        return torch.equal(expected, found)
    scale = expected.abs().max() if expected.numel() else torch.zeros(())
    difference = (expected - found).abs().max() if expected.numel() else torch.zeros(())
    return bool(difference <= limit * scale) or bool(torch.isnan(scale))
