"""Losses for models of Hugging Face transformers, each with the number of tokens that it really sums over.

transformers itself is not imported: all that is used is the form of its batches and outputs (`labels`, `logits`,
`loss`) and what its loss functions do with `num_items_in_batch`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from graphcomp.errors import LossError
from graphcomp.losses import TokenLoss, token_loss

COUNT = "num_items_in_batch"


def causal_lm_loss(output: Any, batch: Mapping[str, Any], ignore_index: int = -100, **options: Any) -> TokenLoss:
    """Next-token loss of a `...ForCausalLM`: position t predicts `labels[..., t + 1]`, and those are counted.

    output: has `logits` (..., length, classes). batch: has `labels` (..., length), unshifted as transformers takes
        them, or `shift_labels` (..., length), which are shifted already and then used as they are.
    options: of `token_loss`. Raises LossError.
    """
    logits, shifted = _logits(output), batch.get("shift_labels")
    if shifted is not None:
        return token_loss(logits, shifted, ignore_index, **options)
    return token_loss(logits[..., :-1, :], _labels(batch)[..., 1:], ignore_index, **options)


def masked_lm_loss(output: Any, batch: Mapping[str, Any], ignore_index: int = -100, **options: Any) -> TokenLoss:
    """Loss of a model whose `labels` stand where they are predicted: masked language models, token classification.

    output: has `logits` (..., classes). batch: has `labels` (...). options: of `token_loss`. Raises LossError.
    """
    return token_loss(_logits(output), _labels(batch), ignore_index, **options)


def seq2seq_lm_loss(output: Any, batch: Mapping[str, Any], ignore_index: int = -100, **options: Any) -> TokenLoss:
    """Loss of an encoder-decoder. The model shifts `labels` to get the decoder's inputs; the loss does not.

    output: has `logits` (rows, length, classes). batch: has `labels` (rows, length). options: of `token_loss`.
    """
    return masked_lm_loss(output, batch, ignore_index, **options)


@dataclass(frozen=True)
class OwnLoss:
    """A loss function for models that compute their loss themselves and divide it by `num_items_in_batch`.

    shift: True if the model's loss shifts `labels`, as causal language models do; the first label of each row is then
        not counted. ignore_index: the label that the model's loss leaves out.

    The microbatches must come through `summed`, so that the model's loss is a sum: not a mean, which would have to be
    multiplied by a count again and is not a number where nothing is valid. A model that ignores the count, or adds to
    the loss something that is not summed over tokens, is refused with LossError while it is captured.
    """

    shift: bool
    ignore_index: int = -100

    def __call__(self, output: Any, batch: Mapping[str, Any]) -> TokenLoss:
        loss = getattr(output, "loss", None)
        if not isinstance(loss, Tensor):
            raise LossError(
                "the model's output brings no loss",
                where=type(output).__name__,
                got=type(loss).__name__,
                do="give the batch the labels that the model computes its loss from",
            )
        if not isinstance(batch.get(COUNT), One):
            raise LossError(
                "the model's own loss is a sum only if its batch asks for one",
                expected=f"batch[{COUNT!r}] as graphcomp.huggingface.summed puts it there",
                got=repr(batch.get(COUNT)),
                do="step([graphcomp.huggingface.summed(batch) for batch in microbatches])",
            )
        if not _is_a_sum(loss) or getattr(output, "aux_loss", None) is not None:
            raise LossError(
                "the model's own loss is not its token losses, summed and divided by the count",
                where=type(output).__name__,
                expected=f"a model whose loss is (sum over tokens) / {COUNT}, and nothing else",
                got=f"a loss that ignores {COUNT}, or that has another term added to it",
                do="compute the loss from the logits: graphcomp.huggingface.causal_lm_loss or masked_lm_loss; "
                "return another term beside it as graphcomp.mean_loss",
            )
        labels = batch.get("shift_labels")
        if labels is None:
            labels = _labels(batch)
            labels = labels[..., 1:] if self.shift else labels
        return TokenLoss(loss, (labels != self.ignore_index).sum())


def summed(batch: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a microbatch, and a count of one: the model's own loss is then a sum. See `OwnLoss`."""
    return {**batch, COUNT: One(1)}


class One(int):
    """The number one, which marks what a model divides by it: how a loss tells that it used the count at all.

    To torch it is an operand with its own rule (the `__torch_function__` protocol); otherwise a plain int.
    """

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        plain = [int(arg) if isinstance(arg, One) else arg for arg in args]
        named = {name: int(arg) if isinstance(arg, One) else arg for name, arg in (kwargs or {}).items()}
        result = function(*plain, **named)
        if function in _DIVISIONS and not kwargs and isinstance(args[0], Tensor) and isinstance(args[-1], One):
            result.graphcomp_sum = result.grad_fn
        return result


# `/` and `/=` arrive as `div` and `div_`.
_DIVISIONS = (torch.Tensor.div, torch.Tensor.div_, torch.Tensor.true_divide, torch.div, torch.true_divide)


def _is_a_sum(loss: Tensor) -> bool:
    """It came out of a division by `One`, and nothing was written to it since (that would have changed `grad_fn`)."""
    return hasattr(loss, "graphcomp_sum") and loss.graphcomp_sum is loss.grad_fn


def _logits(output: Any) -> Tensor:
    logits = getattr(output, "logits", None)
    if not isinstance(logits, Tensor):
        raise LossError(
            "the model's output has no logits",
            where=type(output).__name__,
            got=type(logits).__name__,
            do="take a model with a head, let it return its own output type (return_dict), or write the loss function",
        )
    return logits


def _labels(batch: Mapping[str, Any]) -> Tensor:
    labels = batch.get("labels")
    if not isinstance(labels, Tensor):
        raise LossError(
            "the batch has no labels",
            expected="a tensor of integers in batch['labels']",
            got=", ".join(map(str, batch)),
        )
    return labels
