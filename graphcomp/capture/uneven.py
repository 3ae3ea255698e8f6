"""Activations that do not divide among tensor ranks: refused by name where `DTensor` would fill them up."""

from __future__ import annotations

from types import FrameType

import torch
from torch.fx import Node

from graphcomp.compat.symbols import hint
from graphcomp.compat.tensor_parallel import fills_up
from graphcomp.errors import CaptureError
from graphcomp.ir import meta

_PAD = torch.ops.aten.constant_pad_nd.default


def check_even(node: Node, frame: FrameType | None, module: str | None) -> None:
    """Raise CaptureError if a node that is being made is `DTensor`'s own filling-up of a size of the batch.

    Ranks would hold different numbers of rows. As soon as a layer hands a plain tensor on (`use_local_output`), nobody
    knows the number of all of them any more. Parameters of any size are no problem: their sizes are plain numbers.
    """
    if node.target is not _PAD or not any(map(_is_filled, _amounts(node))):
        return
    if fills_up(frame):
        raise CaptureError(
            "a size of the batch does not divide among the tensor ranks along which an activation is laid out",
            where=f"module '{module}'" if module else None,
            expected="under SequenceParallel, a length that is a multiple of the number of tensor ranks",
            do="pad the sequences (labels of -100 change nothing), or leave these activations whole",
        )


def _is_filled(amount: object) -> bool:
    """Whether it is a size that is computed, and not 0 in the example: where all divides, that is all it can be."""
    return isinstance(amount, Node) and hint(meta.value(amount)) > 0


def _amounts(node: Node) -> list[object]:
    given = node.args[1] if len(node.args) > 1 else ()
    return list(given) if isinstance(given, list | tuple) else []
