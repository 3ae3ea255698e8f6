"""In-place operations become functional ones; what a buffer holds afterwards becomes an output."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.fx import Node

from graphcomp.compat.aliasing import viewed_argument, written_arguments
from graphcomp.compat.estimates import hint
from graphcomp.errors import CaptureError, StateError
from graphcomp.ir import meta
from graphcomp.ir.program import Program
from graphcomp.ir.signature import Buffer, BufferUpdate, Param, Role
from graphcomp.passes.base import Pass
from graphcomp.passes.retrace import Replay, retrace

aten = torch.ops.aten


@dataclass(frozen=True)
class Functionalize(Pass):
    """Replaces in-place operations on intermediates and buffers by functional ones.

    Level: joint and stage; the only pass that takes programs with in-place operations. A buffer that was
    written becomes an output `update`, placed behind the other outputs in the order of the buffers' inputs.

    Sound because torch's own functionalization does it: each write makes a new value, and every later read of
    the tensor or of a view of it reads the new one. Batch norm, whose schema hides that it writes its running
    statistics, is exchanged beforehand for the operation that returns them. Random operations keep their
    order, so they draw the same numbers. Writes to parameters, to the batch or to captured tensors are
    refused by name.

        before: y = add_.Tensor(buffer_count, 1)      z = relu_(x)     return (z,)
        after:  y = add.Tensor(buffer_count, 1)       z = relu(x)      return (z, y)   # y: update count
    """

    name: ClassVar[str] = "functionalize"
    provides: ClassVar[frozenset[str]] = frozenset({"functional"})
    conflicts: ClassVar[frozenset[str]] = frozenset({"decomposed"})
    verifies_input: ClassVar[bool] = False

    def apply(self, program: Program) -> Program:
        return functionalize(program)


def is_functional(program: Program) -> bool:
    """Whether no node of the program writes to one of its arguments."""
    return not any(written_arguments(node) or node.target in HIDDEN_WRITES for node in program.graph.nodes)


def functionalize(program: Program) -> Program:
    """The functional form of a program; the program itself if it is functional already.

    Raises StateError if it writes to a parameter, CaptureError if it writes to the batch or to a captured
    tensor.
    """
    for node in reversed(program.calls()):
        if meta.holds_nothing(node) and not node.users:
            program.graph.erase_node(node)  # a gradient that autograd did not ask for
    if is_functional(program):
        return program
    done = retrace(
        program,
        _Replay,
        transform=lambda run: torch.func.functionalize(run, remove="mutations"),
    )
    new, results, roles = done.program, list(done.program.results), list(program.outputs)
    for role, node in new.input_nodes():
        if node.name not in done.written:
            continue
        if not isinstance(role, Buffer):
            raise _refusal(program, role, node.name)
        update = BufferUpdate(role.name)
        if update not in roles:  # else the module replaced the buffer afterwards, and that value stays
            results.append(done.written[node.name])
            roles.append(update)
    new.output_node.args = (tuple(results),)
    new.set_signature(new.inputs, roles)
    return new


class _Replay(Replay):
    def operation(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tables = (HIDDEN_WRITES, NEEDLESS_READS, STATIC_ONLY, IN_MEMORY)
        exchange = next((table[target] for table in tables if target in table), target)
        return exchange(*args, **kwargs)


def _batch_norm(
    x: Any, weight: Any, bias: Any, mean: Any, variance: Any, training: bool, momentum: float, eps: float
) -> Any:
    """`native_batch_norm` writes its running statistics when training, though its schema does not say so."""
    if not training:
        return aten._native_batch_norm_legit_no_training.default(x, weight, bias, mean, variance, momentum, eps)
    if mean is None:
        return aten._native_batch_norm_legit.no_stats(x, weight, bias, training, momentum, eps)
    return aten._native_batch_norm_legit.default(x, weight, bias, mean, variance, training, momentum, eps)


def _cudnn_batch_norm(  # only on CUDA: torch calls it there alone
    x: Any, weight: Any, bias: Any, mean: Any, variance: Any, training: bool, momentum: float, eps: float
) -> Any:
    """cuDNN's variant has no functional form; the native one computes the same up to rounding. Its fourth
    result is
    scratch space for the backward, which `_cudnn_batch_norm_backward` does not need."""
    scratch = aten.new_empty.default(x, [0], dtype=torch.uint8)
    return *_batch_norm(x, weight, bias, mean, variance, training, momentum, eps), scratch


def _cudnn_batch_norm_backward(  # only on CUDA: torch calls it there alone
    x: Any,
    grad: Any,
    weight: Any,
    mean: Any,
    variance: Any,
    saved_mean: Any,
    saved_inverse: Any,
    eps: float,
    _: Any,
) -> Any:
    """The native backward of the native forward; only training reaches it."""
    return aten.native_batch_norm_backward.default(
        grad, x, weight, None, None, saved_mean, saved_inverse, True, eps, [True, True, True]
    )


def _batch_norm_backward(
    grad: Any,
    x: Any,
    weight: Any,
    mean: Any,
    variance: Any,
    saved_mean: Any,
    saved_inverse: Any,
    training: bool,
    eps: float,
    wanted: Any,
) -> Any:
    """When training, the backward takes the batch's statistics; the running ones need not be kept for it."""
    if training:
        mean = variance = None
    return aten.native_batch_norm_backward.default(
        grad, x, weight, mean, variance, saved_mean, saved_inverse, training, eps, wanted
    )


HIDDEN_WRITES: dict[Any, Callable[..., Any]] = {
    aten.native_batch_norm.default: _batch_norm,
    aten.cudnn_batch_norm.default: _cudnn_batch_norm,
}
NEEDLESS_READS: dict[Any, Callable[..., Any]] = {
    aten.native_batch_norm_backward.default: _batch_norm_backward,
    aten.cudnn_batch_norm_backward.default: _cudnn_batch_norm_backward,
}


def _bernoulli(x: Any, *rest: Any, **options: Any) -> Any:
    """Draws into a transposed tensor in the order of its memory, as eager does; the functional form is row-major."""
    order = sorted(range(x.dim()), key=lambda dimension: -hint(x.stride(dimension)))
    aten.bernoulli_.float(x if order == sorted(order) else x.permute(order), *rest, **options)
    return x


STATIC_ONLY: dict[Any, Callable[..., Any]] = {
    # torch's functionalization of it asks for plain sizes; the functional form draws the same numbers.
    aten.exponential_.default: lambda x, *rate: aten.copy_.default(x, aten.exponential.default(x, *rate)),
}
IN_MEMORY: dict[Any, Callable[..., Any]] = {aten.bernoulli_.float: _bernoulli}


def _root(node: Node) -> Node:
    """The placeholder or call whose memory a chain of views and in-place operations stands on."""
    while (base := viewed_argument(node)) is not None:
        node = base
    return node


def _refusal(program: Program, role: Role, name: str) -> StateError | CaptureError:
    """The error for a write to an input that is no buffer, with the user's line if it can be found."""
    writer = next((n for n in program.calls() if any(_root(w).name == name for w in written_arguments(n))), None)
    where = None
    if writer is not None:
        where = ", ".join((*reversed(meta.place(writer)), f"operation {writer.target}"))
    if isinstance(role, Param):
        return StateError(
            f"the model changes parameter '{role.name}' in place",
            where=where,
            expected="parameters that only the optimizer changes",
            do="make it a buffer, or change it outside of forward",
        )
    return CaptureError(
        f"the model or the loss changes the input '{role}' in place",
        where=where,
        expected="inputs that are only read",
        do="work on a copy: x = x.clone()",
    )
