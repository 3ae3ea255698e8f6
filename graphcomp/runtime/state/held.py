"""Gradients of a step that are not in `.grad` yet."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from graphcomp.errors import StepError
from graphcomp.runtime.results.result import StepResult
from graphcomp.runtime.state.live import LiveState


class HeldStep:
    """A step that has run, but for its last act: its gradients wait to be added to `.grad`.

    result: as of a step. While it lives, and has not deposited, it keeps one gradient for each parameter that this
    rank owns (of a sharded one its rows).
    """

    def __init__(self, result: StepResult, gradients: Mapping[str, torch.Tensor], state: LiveState) -> None:
        self.result = result
        self._gradients: Mapping[str, torch.Tensor] | None = gradients
        self._state = state

    def deposit(self, scale: torch.Tensor | None = None) -> None:
        """Add the gradients, multiplied by `scale` (0-dim), to `.grad` of the parameters; may be done once.

        Raises StepError at a second time, and StateError for a `.grad` that they cannot be added to.
        """
        gradients, self._gradients = self._gradients, None
        if gradients is None:
            raise StepError(
                "the gradients of this step were added to .grad already",
                do="run forward again: a compiled step keeps nothing to differentiate a second time",
            )
        with torch.no_grad():
            if scale is not None:
                # They are this step's own memory: `.grad` takes them over, or adds them.
                for gradient in gradients.values():
                    gradient.mul_(scale.to(gradient.device))
            self._state.writes(gradients, {}).write()
