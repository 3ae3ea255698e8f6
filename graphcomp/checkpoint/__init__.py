"""Original names in, original names out, at every layout: weights, and whole checkpoints to go on from."""

from __future__ import annotations

from graphcomp.checkpoint.saved import load, save, save_async
from graphcomp.checkpoint.weights import load_weights

__all__ = ["load", "load_weights", "save", "save_async"]
