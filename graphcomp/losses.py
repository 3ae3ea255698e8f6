"""Losses and metrics: what a loss function returns, and the one meaning that each form of it has.

A token loss is a sum with its number of tokens, never a mean: only so can the step divide by the tokens of
all its microbatches and ranks. It all runs under tracing: nothing is decided on the contents of a tensor.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

from graphcomp.errors import LossError

UNNAMED = "loss"
"""The name of a single loss that was returned without one."""

Reduction = Literal["sum", "mean", "max", "min", "last"]
REDUCTIONS: tuple[str, ...] = get_args(Reduction)

# `reduction` is not among them: a token loss is a sum by definition.
_CROSS_ENTROPY_OPTIONS = ("label_smoothing", "weight")

_FORMS = "a loss (token_loss, TokenLoss, mean_loss, scalar tensor), a dict of losses by name, or (losses, metrics)"


@dataclass(frozen=True, eq=False)
class TokenLoss:
    """A loss summed over this microbatch, and what it adds to the number that the whole step divides by.

    total: 0-dim floating tensor, the sum.
    tokens: a count (int), or a non-negative weight (float); a tensor of any shape, which is summed, or a
        number. It must come from the batch alone.

    Raises LossError if `total` is not scalar, or `tokens` is negative or depends on parameters.
    """

    total: Tensor
    tokens: Tensor | int | float

    def __post_init__(self) -> None:
        _check_scalar("the total of a token loss", self.total)
        _check_tokens(self.tokens)


@dataclass(frozen=True, eq=False)
class MeanLoss:
    """A 0-dim loss that is averaged over the microbatches of all data ranks, and never divided by tokens."""

    value: Tensor

    def __post_init__(self) -> None:
        _check_scalar("a mean loss", self.value)


@dataclass(frozen=True, eq=False)
class Metric:
    """A 0-dim value to report, and how the values of all microbatches and data ranks become one."""

    value: Tensor | int | float
    reduction: Reduction = "mean"

    def __post_init__(self) -> None:
        if self.reduction not in REDUCTIONS:
            raise LossError(
                "unknown reduction of a metric",
                expected=", ".join(REDUCTIONS),
                got=repr(self.reduction),
                do='for example: gc.metric(correct.sum(), "sum")',
            )
        if isinstance(self.value, Tensor):
            if self.value.dim() != 0 or self.value.is_complex():
                raise LossError(
                    "a metric must be a real scalar",
                    expected="a 0-dim tensor or a number",
                    got=_describe(self.value),
                    do="reduce it over this microbatch first, for example with .sum() or .mean()",
                )
        elif not _is_number(self.value):
            raise LossError(
                "a metric must be a real scalar",
                expected="a 0-dim tensor or a number",
                got=_describe(self.value),
            )


Losses = dict[str, TokenLoss | MeanLoss]
Metrics = dict[str, Metric]


def token_loss(logits: Tensor, labels: Tensor, ignore_index: int = -100, **cross_entropy_options: Any) -> TokenLoss:
    """Cross entropy summed over the labels that are not `ignore_index`, and the number of those.

    logits: (..., classes), floating. labels: (...), integers. Nothing is shifted: for next-token prediction
        pass labels that are shifted already, or `logits[:, :-1]` and `labels[:, 1:]`.
    cross_entropy_options: `label_smoothing`, `weight` (classes,), as in `torch.nn.functional.cross_entropy`;
        neither changes the number of tokens.

    Logits whose classes are laid out over tensor ranks (a DTensor) stay so: each rank works on its classes, as under
    `torch.distributed.tensor.parallel.loss_parallel`, and there are no options. In eager code the backward has to run
    in that context; in a step it does.

    Half precision is computed in fp32. No valid label, or no row at all: a total of exactly 0, and 0 tokens.
    Raises LossError for shapes that do not fit, labels that are no integers, and unknown options.
    """
    _check_cross_entropy(logits, labels, cross_entropy_options)
    context: Any = contextlib.nullcontext()
    if isinstance(logits, DTensor):
        logits, context = _over_tensor_ranks(logits, cross_entropy_options)
    scores = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if cross_entropy_options.get("weight") is not None:
        cross_entropy_options["weight"] = cross_entropy_options["weight"].to(scores)
    if logits.dim() == 1:
        scores, labels = scores.unsqueeze(0), labels.unsqueeze(0)
    with context:
        total = F.cross_entropy(
            scores.flatten(0, -2),
            labels.flatten().long(),
            ignore_index=ignore_index,
            reduction="sum",
            **cross_entropy_options,
        )
    return TokenLoss(total, (labels != ignore_index).sum())


def _over_tensor_ranks(logits: DTensor, options: dict[str, Any]) -> tuple[Tensor, Any]:
    """The logits to compute a loss of, and the context for that."""
    if not any(placement.is_shard(logits.dim() - 1) for placement in logits.placements):
        return logits.full_tensor(), contextlib.nullcontext()
    if options.get("weight") is not None or options.get("label_smoothing"):
        raise LossError(
            "token_loss has no options where the classes are laid out over tensor ranks",
            got=", ".join(options),
            do="give it the whole logits: ColwiseParallel(output_layouts=Replicate()), or logits.full_tensor()",
        )
    return logits, loss_parallel()


def mean_loss(x: Tensor) -> MeanLoss:
    """An auxiliary loss: 0-dim, averaged over the microbatches of all data ranks, never divided by tokens."""
    return MeanLoss(x)


def metric(x: Tensor | int | float, reduction: Reduction = "mean") -> Metric:
    """A value to report: 0-dim, reduced over the microbatches of all data ranks as `reduction` says."""
    return Metric(x, reduction)


def normalize(result: object, where: str | None = None) -> tuple[Losses, Metrics]:
    """Bring whatever a loss function returned into one form: losses by name and metrics by name.

    In the result every `TokenLoss.tokens` is a 0-dim tensor (int64 for a count) and every `Metric.value` a
    detached 0-dim tensor. `where` says in messages whose result this is. Raises LossError, naming the forms.
    """
    metrics: Any = {}
    if isinstance(result, tuple):
        if len(result) != 2:
            raise _not_a_loss(f"a tuple of {len(result)}", where)
        result, metrics = result
        if not isinstance(metrics, Mapping):
            raise LossError(
                "the second part of (losses, metrics) must be a dict of metrics by name",
                where=where,
                got=_describe(metrics),
                do='for example: return loss, {"accuracy": gc.metric(correct.mean())}',
            )
    named = result if isinstance(result, Mapping) else {UNNAMED: result}
    if not named:
        raise _not_a_loss("a dict without any loss", where)
    losses = {_name(name, where): _as_loss(name, value, where) for name, value in named.items()}
    first = next(iter(losses.values()))
    device = (first.total if isinstance(first, TokenLoss) else first.value).device
    reported = {_name(name, where): _as_metric(name, value, device, where) for name, value in metrics.items()}
    return losses, reported


def from_output(output: object) -> tuple[Losses, Metrics]:
    """The rule without a loss function: the model's own output has `.loss`. Returns what `normalize` does."""
    where = f"the model's output ({type(output).__name__}) with loss_fn=None"
    loss = getattr(output, "loss", None)
    if loss is None:
        missing = "its loss is None" if hasattr(output, "loss") else "it has no attribute `loss`"
        raise LossError(
            "there is no loss function, and the model's output brings no loss",
            where=where,
            got=missing,
            do="pass loss_fn, or give the batch what the model needs to compute a loss (such as labels)",
        )
    return normalize(loss, where)


def _as_loss(name: object, value: object, where: str | None) -> TokenLoss | MeanLoss:
    if isinstance(value, TokenLoss):
        return TokenLoss(value.total, _count(value.tokens, value.total.device))
    if isinstance(value, MeanLoss):
        return value
    if isinstance(value, Tensor):
        return MeanLoss(value)
    if isinstance(value, Metric):
        raise LossError(
            f"loss {name!r} is a metric",
            where=where,
            do="return metrics in the second part of (losses, metrics)",
        )
    raise _not_a_loss(_describe(value) if name == UNNAMED else f"loss {name!r}: {_describe(value)}", where)


def _as_metric(name: object, value: object, device: torch.device, where: str | None) -> Metric:
    if isinstance(value, TokenLoss | MeanLoss):
        raise LossError(
            f"metric {name!r} is a loss",
            where=where,
            do="a loss belongs in the first part of (losses, metrics); report its number with gc.metric",
        )
    found = value if isinstance(value, Metric) else Metric(value)  # type: ignore[arg-type]
    if isinstance(found.value, Tensor):
        return Metric(found.value.detach(), found.reduction)
    integral = isinstance(found.value, int | torch.SymInt)
    dtype = torch.int64 if integral else torch.float64
    return Metric(torch.full((), found.value, dtype=dtype, device=device), found.reduction)


def _count(tokens: Tensor | int | float, device: torch.device) -> Tensor:
    """A 0-dim tensor: int64 for integers and booleans, at least fp32 for weights."""
    if not isinstance(tokens, Tensor):
        dtype = torch.int64 if isinstance(tokens, int | torch.SymInt) else torch.float64
        return torch.full((), tokens, dtype=dtype, device=device)
    wide = torch.promote_types(tokens.dtype, torch.float32) if tokens.is_floating_point() else torch.int64
    return tokens.to(wide) if tokens.dim() == 0 else tokens.sum(dtype=wide)


def _name(name: object, where: str | None) -> str:
    if not isinstance(name, str) or not name:
        raise LossError("losses and metrics have names", where=where, expected="a non-empty string", got=repr(name))
    return name


def _check_scalar(what: str, x: object) -> None:
    if not isinstance(x, Tensor) or x.dim() != 0 or not x.is_floating_point():
        raise LossError(
            f"{what} must be a scalar",
            expected="a 0-dim floating-point tensor",
            got=_describe(x),
            do="sum the loss of the tokens, or average an auxiliary loss, inside the loss function",
        )


def _check_tokens(tokens: object) -> None:
    expected = "an integer or floating-point tensor, or a non-negative number"
    if isinstance(tokens, Tensor):
        if tokens.requires_grad:
            raise LossError(
                "the tokens of a loss depend on parameters",
                expected="a number of tokens that comes from the batch alone",
                got=_describe(tokens),
                do="count labels or sum weights of the batch, or .detach() them",
            )
        if tokens.is_complex():
            raise LossError("the tokens of a loss must be real", expected=expected, got=_describe(tokens))
    elif not _is_number(tokens):
        raise LossError("the tokens of a loss must be a count", expected=expected, got=_describe(tokens))
    elif isinstance(tokens, int | float) and not (tokens >= 0 and math.isfinite(tokens)):
        raise LossError("the tokens of a loss must not be negative", expected=expected, got=repr(tokens))


def _check_cross_entropy(logits: object, labels: object, options: dict[str, Any]) -> None:
    unknown = sorted(set(options) - set(_CROSS_ENTROPY_OPTIONS))
    if unknown:
        raise LossError(
            f"token_loss knows no option {unknown[0]!r}",
            expected=", ".join(_CROSS_ENTROPY_OPTIONS),
            do="a token loss is always a sum; for another one build TokenLoss(total, tokens) yourself",
        )
    if not isinstance(logits, Tensor) or not logits.is_floating_point() or logits.dim() == 0:
        raise LossError("token_loss needs logits", expected="floating, (..., classes)", got=_describe(logits))
    if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.is_complex():
        raise LossError("token_loss needs class numbers as labels", expected="integers, (...)", got=_describe(labels))
    if labels.dim() != logits.dim() - 1 or not _fit(logits.shape[:-1], labels.shape):
        raise LossError(
            "logits and labels do not fit",
            expected="labels of the shape of logits without its last dimension",
            got=f"logits {_describe(logits)}, labels {_describe(labels)}",
            do="nothing is shifted or reshaped for you: pass for example logits[:, :-1] and labels[:, 1:]",
        )


def _fit(rows: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether shapes are equal. One size known at run time only is left to `cross_entropy`, which compares the rows."""
    unknown = 0
    for size, other in zip(rows, others, strict=True):
        equal = size == other
        if isinstance(equal, torch.SymBool):
            from torch.fx.experimental.symbolic_shapes import guard_or_false, guard_or_true

            unknown += (maybe := guard_or_true(equal)) and not guard_or_false(equal)
            equal = maybe
        if not equal:
            return False
    return unknown <= 1


def _is_number(x: object) -> bool:
    return isinstance(x, int | float | torch.SymInt | torch.SymFloat) and not isinstance(x, bool)


def _not_a_loss(got: str, where: str | None) -> LossError:
    do = "does the loss function end with `return`?" if got == "None" else None
    return LossError("this is no loss", where=where or "the loss function's result", expected=_FORMS, got=got, do=do)


def _describe(x: object) -> str:
    if isinstance(x, Tensor):
        return f"{str(x.dtype).removeprefix('torch.')} tensor of shape {tuple(x.shape)}"
    return "None" if x is None else f"{type(x).__name__} {x!r}"[:120]
