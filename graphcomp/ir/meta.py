"""Typed annotations on graph nodes. The only place that knows the keys of `node.meta`."""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from enum import StrEnum

import torch
from torch.fx import Node

_NOTE, _VALUE = "graphcomp", "val"


class Phase(StrEnum):
    """The part of the training step that a node belongs to."""

    FORWARD = "forward"
    LOSS = "loss"
    BACKWARD = "backward"


@dataclass(frozen=True)
class Note:
    """Where a node comes from.

    module: qualified name of the innermost module that ran it ("" for the root, None outside of the model).
    source: the user's line, "file.py:12", or None.
    operation: number of the differentiable operation, in order of execution: a forward node that is one has it, and so
        have the backward nodes made from it (its twin is the forward node with the same number); None for the rest.
    gradient_sum: autograd made this addition because a value has several consumers.
    recompute: number of the checkpointed region the node belongs to, None outside; equal nodes of different
        regions must not be merged.
    kept: the user's policy keeps this value of a region instead of having it computed again.
    chunk: number of the chunk of rows that head and loss are computed for; all chunks stay on one stage.
    """

    phase: Phase
    module: str | None = None
    source: str | None = None
    operation: int | None = None
    gradient_sum: bool = False
    recompute: int | None = None
    kept: bool = False
    chunk: int | None = None


def note(node: Node) -> Note:
    """The annotation of a node; placeholders and outputs count as forward code of no module."""
    found = node.meta.get(_NOTE)
    return found if isinstance(found, Note) else Note(Phase.FORWARD)


def place(node: Node) -> list[str]:
    """Where a node comes from, in words: its module and the user's line, as far as they are known."""
    found = note(node)
    return [*([f"module '{found.module}'"] if found.module else []), *([found.source] if found.source else [])]


def noted(node: Node) -> Note | None:
    """The annotation of a node; None if it has none."""
    found = node.meta.get(_NOTE)
    return found if isinstance(found, Note) else None


def annotate(node: Node, value: Note) -> None:
    node.meta[_NOTE] = value


def amend(node: Node, **changes: object) -> None:
    """Change single fields of a node's annotation."""
    annotate(node, replace(note(node), **changes))  # type: ignore[arg-type]


def inherit(new: Node, old: Node) -> None:
    """The copy rule: a node that a pass puts in the place of another takes over its annotation, not its value."""
    if _NOTE in old.meta:
        new.meta[_NOTE] = old.meta[_NOTE]


Value = torch.Tensor | torch.SymInt | int | torch.SymFloat | float | torch.SymBool | bool | None


def value(node: Node) -> object:
    """What the node computes, as a fake tensor (or a tuple of them), a symbolic or plain number; None if unknown."""
    return node.meta.get(_VALUE)


def holds_nothing(node: Node) -> bool:
    """Whether a part of a result does not exist: a gradient that nobody asked for, or a list of such."""
    return node.target is operator.getitem and _is_nothing(value(node))


def _is_nothing(found: object) -> bool:
    return all(map(_is_nothing, found)) if isinstance(found, tuple | list) else found is None


def set_value(node: Node, new: object) -> None:
    node.meta[_VALUE] = new


def tensor(node: Node) -> torch.Tensor | None:
    """The fake tensor a node computes, or None if it computes something else."""
    found = value(node)
    return found if isinstance(found, torch.Tensor) else None
