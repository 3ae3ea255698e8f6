"""Functions given to operators while something is traced: what they close over becomes arguments of the operator.

Under `torch.compile` Dynamo takes a function apart and hands over what it closes over. Nothing public does that for a
trace. Here a function is run twice: once to see which values from outside it uses, then with arguments of the operator
in their place.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FunctionType
from typing import Any

import sympy
import torch
from torch._dynamo import config as dynamo
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, make_fx
from torch.nn.attention import flex_attention as public
from torch.utils._pytree import tree_leaves, tree_map_only

from graphcomp.compat.function_modes import FunctionMode
from graphcomp.compat.higher_order import FLEX_ATTENTION, FunctionsRefusedError
from graphcomp.compat.run_time_sizes import is_run_time

__all__ = ["TakeFunctions", "as_written_by_the_user", "functions_differentiated", "uncompiled"]


@contextlib.contextmanager
def as_written_by_the_user() -> Iterator[None]:
    """Within, what is under `torch.compile` runs as it is written, and `flex_attention` calls its operator itself, as
    else under Dynamo only; also with gradients on a CPU, where torch has no fused backward."""
    before = public._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG, public._validate_device

    def validate(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        if query.device.type != "cpu":
            before[1](query, key, value)

    public._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG, public._validate_device = True, validate
    try:
        with dynamo.patch(error_on_nested_fx_trace=False):
            yield
    finally:
        public._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG, public._validate_device = before


def uncompiled(value: object) -> Any:
    """The function that `torch.compile` was given; None for anything else than its result."""
    return vars(value).get("_torchdynamo_orig_callable") if isinstance(value, FunctionType) else None


class TakeFunctions(FunctionMode):
    """Around a trace: what the functions given to an operator close over becomes arguments of the operator.

    Raises FunctionsRefusedError for a mask that needs a gradient, and for a size known at run time only.
    """

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is FLEX_ATTENTION:
            return _attend(*args, **kwargs)
        return func(*args, **kwargs)


@contextlib.contextmanager
def functions_differentiated() -> Iterator[None]:
    """Within, `flex_attention` in eager code has its gradients on every device, also on a CPU."""
    with as_written_by_the_user(), TakeFunctions():
        yield


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score: Callable[..., Any],
    block_mask: tuple[Any, ...],
    scale: float,
    options: dict[str, Any],
    score_values: tuple[Any, ...] = (),
    mask_values: tuple[Any, ...] = (),
) -> Any:
    indices = [query.new_zeros((), dtype=torch.int) for _ in range(4)]
    of_score = _Lifted(score, [query.new_zeros(()), *indices], score_values)
    of_mask = _Lifted(block_mask[-1], indices, mask_values)
    if any(isinstance(one, torch.Tensor) and one.requires_grad for one in of_mask.values):
        what = "whose mask reads a value that needs a gradient, which a mask cannot give"
        raise FunctionsRefusedError("flex_attention", what, "detach it, or use it in score_mod")
    given = (query, key, value, of_score, (*block_mask[:-1], of_mask), scale, options, of_score.values, of_mask.values)
    result = FLEX_ATTENTION(*given)
    of_score.freeze()
    of_mask.freeze()
    return result


class _Lifted:
    """A function whose values from outside are arguments, behind its own.

    examples: what stands for its own arguments. values: what it is given behind them, then what it uses from outside.
    torch's backward knows the gradient of what is indexed only, so a single number that needs one is indexed, too.
    Once frozen it does not run the user's code any more: in backward, that would see other variables than in forward.
    """

    def __init__(self, function: Callable[..., Any], examples: Sequence[Any], values: Sequence[Any]) -> None:
        self.function, self.examples, self.count = function, tuple(examples), len(examples) + len(values)
        self.frozen: GraphModule | None = None
        with disable_proxy_modes_tracing(), torch.no_grad(), TransformGetItemToIndex():
            outside = _Outside((*examples, *values))
            with outside:
                function(*examples, *values)
        self._outside = tuple(outside.found)
        self.values = (*values, *(one.reshape(1) if _is_alone(one) else one for one in self._outside))

    def __call__(self, *given: Any) -> Any:
        if self.frozen is not None:
            return self.frozen(*given)
        zero = given[1] * 0 if any(map(_is_alone, self._outside)) else None
        pairs = zip(self._outside, given[self.count :], strict=True)
        with _Exchange(self._outside, [new[zero] if _is_alone(old) else new for old, new in pairs]):
            return self.function(*given[: self.count])

    def freeze(self) -> None:
        with disable_proxy_modes_tracing(), torch.no_grad(), TransformGetItemToIndex():
            trace = make_fx(self, tracing_mode="real", _allow_non_fake_inputs=True)
            self.frozen = trace(*self.examples, *self.values)


def _is_alone(value: object) -> bool:
    """Whether a value from outside is a single number that needs a gradient."""
    return isinstance(value, torch.Tensor) and value.dim() == 0 and value.requires_grad


class _Outside(FunctionMode):
    """Within, collects the tensors and symbolic sizes that operations use and none of them has made, in order."""

    def __init__(self, known: Iterable[Any]) -> None:
        super().__init__()
        self.found: list[Any] = []
        self._known = {_identity(one): one for leaf in known for one in _made_of(leaf)}

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for leaf in tree_leaves((args, kwargs)):
            for one in _made_of(leaf):
                identity = _identity(one)
                if identity not in self._known:
                    self._known[identity] = one
                    self.found.append(one)
        result = func(*args, **kwargs)
        for one in tree_leaves(result):
            if isinstance(one, torch.Tensor):
                self._known[_identity(one)] = one  # which keeps it alive, so that no other gets its number
        return result


def _made_of(value: object) -> list[Any]:
    """What stands for a value that comes from outside: a tensor itself, the symbols of a size."""
    if isinstance(value, torch.Tensor):
        return [value]
    if is_run_time(value):
        what = "one of whose functions uses a size that is known at run time only"
        raise FunctionsRefusedError("flex_attention", what, "use it outside of the function")
    if isinstance(value, torch.SymInt) and isinstance(value.node.expr, sympy.Basic):
        env = value.node.shape_env
        symbols = sorted(value.node.expr.free_symbols, key=str)
        return [env.create_symintnode(symbol, hint=int(env.backed_var_to_val[symbol])) for symbol in symbols]
    return []


def _identity(value: Any) -> object:
    return id(value) if isinstance(value, torch.Tensor) else value.node.expr


class _Exchange(FunctionMode):
    """Within, operations are given one tensor in the place of another. Sizes need none: a trace finds them by value."""

    def __init__(self, old: Sequence[Any], new: Sequence[Any]) -> None:
        super().__init__()
        pairs = zip(old, new, strict=True)
        self._table = {id(one): other for one, other in pairs if isinstance(one, torch.Tensor)}

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        args, kwargs = tree_map_only(torch.Tensor, lambda x: self._table.get(id(x), x), (args, kwargs))
        return func(*args, **kwargs)
