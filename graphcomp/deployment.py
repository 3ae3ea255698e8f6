"""A later start that captures and compiles nothing: what an earlier one has saved is taken over."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from graphcomp.plan import Plan
from graphcomp.step import CompiledStep, compile_train_step


def load(
    folder: str | Path,
    model: nn.Module,
    loss_fn: Callable[[Any, Any], Any] | None = None,
    *,
    plan: Plan | None = None,
) -> CompiledStep:
    """A step of this model that uses the programs which `step.save(folder)` has written.

    Microbatches of kinds that it had not seen are captured and compiled as ever. Weights are not part of it. Loading
    runs code that is in the folder: load only what you, or somebody you trust, has saved.

    Raises ArtifactError, naming what has changed, old and new, if the programs are not those of this model, this plan,
    these versions and this machine; with a mesh on all ranks, if one of them finds that.
    """
    step = compile_train_step(model, loss_fn, plan=plan)
    step.take_over(folder)
    return step
