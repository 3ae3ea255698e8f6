"""Takes the running statistics of batch norm out of the operation that normalises with those of the batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.fx import Node

from graphcomp.ir.program import Program
from graphcomp.passes.base import Pass
from graphcomp.passes.retrace import Replay, retrace

aten = torch.ops.aten
NORM = aten._native_batch_norm_legit_functional.default


@dataclass(frozen=True)
class SplitNorms(Pass):
    """Computes the new running statistics of batch norm from those of the batch, in nodes of their own.

    Level: joint, between functionalize and partition, where several data ranks change the same buffers: what is
    normalised then depends on the batch alone, and the old statistics reach nothing but the new ones.

    Sound because the operation yields `momentum * batch + (1 - momentum) * old`, which with a momentum of 1 and zeros
    for the old ones is the batch's own. On CPU: bitwise equal in f64; in f32 a running variance, which the operation
    adds up in parts of either precision, may be rounded another way in its last bit. One that normalises with the old
    statistics (training=False) changes none, and stays as it is.

        before: %n = _native_batch_norm_legit_functional(%x, %w, %b, %mean, %var, True, 0.1, 1e-05)    %new = %n[3]
        after:  %z = new_zeros(%x, [6])
                %n = _native_batch_norm_legit_functional(%x, %w, %b, %z, %z, True, 1.0, 1e-05)         %batch = %n[3]
                %new = add(mul(%batch, 0.1), mul(%mean, 0.9))
    """

    name: ClassVar[str] = "split_norms"
    requires: ClassVar[frozenset[str]] = frozenset({"functional"})
    conflicts: ClassVar[frozenset[str]] = frozenset({"decomposed"})

    def apply(self, program: Program) -> Program:
        if all(node.target is not NORM for node in program.calls()):
            return program
        return retrace(program, _Split).program


class _Split(Replay):
    norm: Node | None = None

    def observe(self, made: Node) -> None:
        """The new norm takes over the name of the old one, and not what is made behind it."""
        origin = self.origin.get(self.norm) if self.norm is not None else None
        super().observe(made)
        if made.target is NORM:
            self.norm = made
        elif self.norm is not None and origin is not None and self.origin.get(made) is origin:
            self.last[origin] = self.norm

    def operation(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return _split(*args, **kwargs) if target is NORM else target(*args, **kwargs)


def _split(
    x: Any, weight: Any, bias: Any, mean: Any, variance: Any, training: bool, momentum: float, eps: float
) -> tuple[Any, ...]:
    if not training:  # it normalises with what it is given, and changes none of it
        return NORM(x, weight, bias, mean, variance, training, momentum, eps)
    zeros = [aten.new_zeros.default(x, list(old.shape), dtype=old.dtype) for old in (mean, variance)]
    *normal, batch_mean, batch_variance = NORM(x, weight, bias, *zeros, training, 1.0, eps)
    return (*normal, _moved(mean, batch_mean, momentum), _moved(variance, batch_variance, momentum))


def _moved(old: Any, batch: Any, momentum: float) -> Any:
    return aten.add.Tensor(aten.mul.Tensor(batch, momentum), aten.mul.Tensor(old, 1 - momentum))
