"""graphcomp turns the training step of an ordinary `nn.Module` into one compiled pipeline program."""

from __future__ import annotations

import importlib
from typing import Any

from graphcomp import collectives, errors
from graphcomp.buckets import Buckets, Pad
from graphcomp.clip import clip_grad_norm_
from graphcomp.compiler import GraphCompiler
from graphcomp.deployment import load
from graphcomp.losses import MeanLoss, Metric, TokenLoss, mean_loss, metric, token_loss
from graphcomp.plan import Plan
from graphcomp.protocol import CompiledModel, StepOutput, Trainable, compile
from graphcomp.runtime.results.result import MicrobatchResult, StepResult, combine
from graphcomp.runtime.state.optimizer_state import shard_optimizer_state
from graphcomp.step import CompiledStep, compile_train_step

__version__ = "0.1.0"

__all__ = [
    "Buckets",
    "CompiledModel",
    "CompiledStep",
    "GraphCompiler",
    "MeanLoss",
    "Metric",
    "MicrobatchResult",
    "Pad",
    "Plan",
    "StepOutput",
    "StepResult",
    "TokenLoss",
    "Trainable",
    "clip_grad_norm_",
    "collectives",
    "combine",
    "compile",
    "compile_train_step",
    "errors",
    "load",
    "mean_loss",
    "metric",
    "shard_optimizer_state",
    "token_loss",
]

_LAZY = ("checkpoint", "inspect", "testing")


def __getattr__(name: str) -> Any:
    """`graphcomp.checkpoint`, `.inspect` and `.testing` read everything and are imported only when asked for."""
    if name in _LAZY:
        return importlib.import_module(f"graphcomp.{name}")
    raise AttributeError(f"module 'graphcomp' has no attribute '{name}'")
