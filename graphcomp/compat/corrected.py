"""What Inductor computes wrong, and says nothing. It has no hook for any of it, so its tables are others for a while.

- It gives a result the memory of an argument that nobody uses later, and does not see that another argument of the
  same operation may be a view of it: `x.index_put((i,), x[:-1])` then reads what it has just written.
- The gradient of an average over windows that reach over the edge (`ceil_mode`) divides by their whole size.
- Code that it finds on disk comes with the conditions under which it holds, but only with those on numbers that are
  inputs: conditions on sizes of tensors are lost.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node
from torch.utils._pytree import tree_leaves

from graphcomp.compat.replaced import replaced

_aten = torch.ops.aten


@contextlib.contextmanager
def corrected() -> Iterator[None]:
    """Within, Inductor makes none of these mistakes."""
    from torch._inductor import lowering
    from torch._inductor.codecache import GuardedCache
    from torch._inductor.fx_passes.reinplace import inplaceable_ops

    writers = {
        target: replace(op, extra_check=_reads_nothing_there(op.extra_check)) for target, op in inplaceable_ops.items()
    }
    fallbacks = {
        _aten.avg_pool2d_backward.default: lowering.fallback_avg_pool2d_backward,
        _aten.avg_pool3d_backward.default: lowering.fallback_avg_pool3d_backward,
    }
    table: dict[Any, Any] = lowering.lowerings
    pools = {target: _divided(table[target], fallback) for target, fallback in fallbacks.items()}
    sizes = (GuardedCache, "_filter_backed_symints", classmethod(lambda _, inputs: _sizes(inputs)))
    with _entries(inplaceable_ops, writers), _entries(table, pools), replaced(sizes):
        yield


@contextlib.contextmanager
def _entries(table: dict[Any, Any], changes: Mapping[Any, Any]) -> Iterator[None]:
    before = {key: table[key] for key in changes}
    table.update(changes)
    try:
        yield
    finally:
        table.update(before)


def _reads_nothing_there(check: Callable[[Node], bool]) -> Callable[[Node], bool]:
    """`check`, and that no other argument stands in the memory of the one that is written."""

    def both(node: Node) -> bool:
        from torch._inductor.fx_utils import get_node_storage

        written: Any = node.args[0]
        others = [one for one in tree_leaves((node.args[1:], node.kwargs)) if isinstance(one, Node)]
        return check(node) and get_node_storage(written) not in map(get_node_storage, others)

    return both


def _divided(lower: Callable[..., Any], fallback: Callable[..., Any]) -> Callable[..., Any]:
    """How the gradient of an average is lowered. fallback: eager PyTorch's own kernel."""

    def gradient(
        grad: Any, x: Any, size: Any, stride: Any, padding: Any, ceil: bool, with_padding: bool, divisor: Any = None
    ) -> Any:
        is_wrong = ceil and with_padding and divisor is None
        return (fallback if is_wrong else lower)(grad, x, size, stride, padding, ceil, with_padding, divisor)

    return gradient


def _sizes(inputs: Sequence[Any]) -> list[torch.SymInt]:
    """Each symbol that the inputs of a graph had at first (one may be a number by now), in the order of their names."""
    found: dict[str, torch.SymInt] = {}
    for number in (number for one in inputs for number in _numbers(one)):
        if isinstance(number, torch.SymInt):
            environment = number.node.shape_env
            for symbol in number.node._expr.free_symbols & environment.backed_var_to_val.keys():
                hint = int(environment.backed_var_to_val[symbol])
                found[str(symbol)] = environment.create_symintnode(symbol, hint=hint)
    return [found[name] for name in sorted(found)]


def _numbers(value: Any) -> Sequence[Any]:
    return (*value.shape, *value.stride(), value.storage_offset()) if isinstance(value, torch.Tensor) else (value,)
