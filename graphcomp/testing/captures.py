"""Captures that several steps share, for looking at one model under many plans."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from graphcomp.capture import Joint, capture
from graphcomp.capture.batch import batch_key, describe
from graphcomp.capture.guards import ModelGuard
from graphcomp.compiler import Specialisation
from graphcomp.errors import GuardError


class SharedCaptures:
    """In the place of `capture`: what was captured under the same facts, from a batch of the same sizes, is reused.

    Models that are built alike share, as do a model's steps: a guard's facts decide, as they do within one step. Only
    what holds tensors of user code, or names process groups, stays with its own model, loss function and mesh.

    limit: how many are kept, those used last; None: all.
    """

    def __init__(self, limit: int | None = None) -> None:
        self._known: dict[Any, tuple[Any, Joint]] = {}
        self._limit = limit
        self.number = 0
        self.seconds = 0.0

    def __call__(
        self,
        model: nn.Module,
        loss_fn: Callable[[Any, Any], Any] | None,
        batch: Any,
        *,
        training: bool = True,
        device: torch.device | None = None,
        mesh: Any = None,
    ) -> Joint:
        # The sizes too: a program's text and balance know those of the example.
        sizes = tuple(leaf.shape for leaf in describe(batch)[1].values())
        facts = ModelGuard(model, loss_fn, device).key()
        key = (facts, batch_key(batch)[0], sizes, training, device)
        owner, joint = self._known.pop(key, (None, None))
        if joint is None or not (owner is None or (owner == (model, loss_fn, mesh) and _holds(joint))):
            joint = capture(model, loss_fn, batch, training=training, device=device, mesh=mesh)
            owner = (model, loss_fn, mesh) if joint.captured or joint.groups else None
            self.number += 1
            self.seconds += joint.seconds
        self._known[key] = owner, joint
        if self._limit is not None and len(self._known) > self._limit:
            del self._known[next(iter(self._known))]
        return joint


def _holds(joint: Joint) -> bool:
    """Whether the tensors that user code holds by itself still have the form that the program has for them."""
    with contextlib.suppress(GuardError):
        Specialisation(0, joint).read_captured()
        return True
    return False
