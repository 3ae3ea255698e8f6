"""The last look at a step, which may stop it on all ranks: the user's hooks, and values that are not finite."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from graphcomp.runtime.program.finite import Place, not_finite
from graphcomp.runtime.ranks.agreement import Agreement
from graphcomp.runtime.results.result import MicrobatchResult

Hook = Callable[[MicrobatchResult], object]
Parts = tuple[Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]]
"""A microbatch's shares of the losses, and its own metrics."""


@dataclass(frozen=True)
class Looking:
    """What to do when a step has run, and before anything is written. number: of the step."""

    number: int = 0
    hooks: tuple[Hook, ...] = ()

    def run_hooks(self, microbatches: Iterable[Parts], outputs: Sequence[Any]) -> Exception | None:
        """Every hook once a microbatch, in the order of the step's list. outputs: one each, or none at all.

        Returns what one has raised; the others are not run then.
        """
        for index, (losses, metrics) in enumerate(microbatches):
            loss = torch.stack(list(losses.values())).sum()
            output = outputs[index] if outputs else None
            result = MicrobatchResult(self.number, index, loss, losses, metrics, output)
            for hook in self.hooks:
                try:
                    hook(result)
                except Exception as error:
                    error.add_note(f"in a hook, for microbatch {index} of step {self.number}")
                    return error
        return None

    def agree(self, agreement: Agreement, places: Sequence[Place | None], failure: Exception | None) -> None:
        """Raise on all ranks if a hook has raised on one of them, or if something is not finite there."""
        everyone = agreement.share("", failure, "run its hooks", more=places)
        if failure is not None:
            raise failure
        error = not_finite([place for line in everyone for own in line for place in own], self.number)
        if error is not None:
            raise agreement.told(error)
